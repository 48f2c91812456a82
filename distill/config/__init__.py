"""Settings of the commands: frozen dataclasses, ranges checked on construction. Imports nothing heavy.

Those of the commands that measure lie in their room, distill/results, and export's in its own.
"""

from distill.config.cache import CacheConfig, ScoredDataConfig
from distill.config.checks import refuse_model_keys, refuse_unused, require_budget
from distill.config.commands import GenerateConfig, InitConfig, RunConfig
from distill.config.data import DataConfig
from distill.config.fit import FitConfig, JudgeConfig, OptimizerConfig
from distill.config.lora import LoraConfig
from distill.config.objective import OPTIONS, SERVINGS, LossConfig, SelectionConfig
from distill.config.on_policy import OnPolicyConfig, ReinforceConfig, ReplayConfig, TextsConfig
from distill.config.server import ServerConfig
from distill.config.teacher import TeacherConfig

__all__ = [
    "OPTIONS",
    "SERVINGS",
    "CacheConfig",
    "DataConfig",
    "FitConfig",
    "GenerateConfig",
    "InitConfig",
    "JudgeConfig",
    "LoraConfig",
    "LossConfig",
    "OnPolicyConfig",
    "OptimizerConfig",
    "ReinforceConfig",
    "ReplayConfig",
    "RunConfig",
    "ScoredDataConfig",
    "SelectionConfig",
    "ServerConfig",
    "TeacherConfig",
    "TextsConfig",
    "refuse_model_keys",
    "refuse_unused",
    "require_budget",
]
