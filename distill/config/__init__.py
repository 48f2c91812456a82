"""Settings of the commands: frozen dataclasses, ranges checked on construction. Imports nothing heavy.

Those of the commands that measure lie in their room, distill/results, and export's in its own.
"""

from distill.config.checks import refuse_model_keys, refuse_unused, require_budget
from distill.config.commands import GenerateConfig, InitConfig, RunConfig
from distill.config.data import DataConfig
from distill.config.fit import FitConfig, JudgeConfig, OptimizerConfig
from distill.config.objective import LossConfig
from distill.config.teacher import TeacherConfig

__all__ = [
    "DataConfig",
    "FitConfig",
    "GenerateConfig",
    "InitConfig",
    "JudgeConfig",
    "LossConfig",
    "OptimizerConfig",
    "RunConfig",
    "TeacherConfig",
    "refuse_model_keys",
    "refuse_unused",
    "require_budget",
]
