"""The command line: a subcommand's options become a config, one library call runs it, errors become exit statuses."""

import argparse
import difflib
import importlib.metadata
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from decode.errors import DraftsmithError, UsageError
from distill.cli import commands
from distill.config import CacheConfig, FitConfig, GenerateConfig, InitConfig, RunConfig
from distill.export.config import ExportConfig
from distill.results.config import BenchConfig, EvalConfig

INTERRUPTED = 130


@dataclass(frozen=True)
class Command:
    summary: str
    config: type
    call: Callable[[Any], None]


COMMANDS = {
    "generate": Command("let the target answer prompts: the training data", GenerateConfig, commands.run_generate),
    "init": Command("make an untrained draft for a target", InitConfig, commands.run_init),
    "cache": Command("score data once, for fits that train from it; or check that", CacheConfig, commands.run_cache),
    "fit": Command("distil the draft on the target's logits, judging checkpoints", FitConfig, commands.run_fit),
    "eval": Command("measure acceptance and speed of drafts and checkpoints", EvalConfig, commands.run_eval),
    "bench": Command("compare ways to decode, timed side by side, and check them", BenchConfig, commands.run_bench),
    "export": Command("write the draft as a plain model directory, and check it", ExportConfig, commands.run_export),
    "run": Command("decode one prompt with a draft", RunConfig, commands.run_run),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's); returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words or os.environ.get("DRAFTSMITH_DEBUG", "0") not in ("", "0")
    name = f"draftsmith {words[0]}" if words and words[0] in COMMANDS else "draftsmith"
    try:
        with warnings.catch_warnings():
            try:
                return _dispatch(words, debug)
            finally:
                sys.stdout.flush()  # here, where a closed pipe is still ours to handle
    except BaseException as error:
        status, line = _outcome(error)
        if debug:
            traceback.print_exc()
        if line:
            print(f"{name}: {line}", file=sys.stderr)
        return status


def _dispatch(words: list[str], debug: bool) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_help(), file=sys.stdout if words else sys.stderr)
        return 0 if words else UsageError.exit_status
    if words[0] == "--version":
        print(f"draftsmith {importlib.metadata.version('draftsmith')}")
        return 0
    command = COMMANDS.get(words[0])
    if command is None:
        raise UsageError(_unknown_command(words[0]))
    return _run(words[0], command, words[1:], debug)


def _run(name: str, command: Command, argv: list[str], debug: bool) -> int:
    from distill.cli.keys import keys_of
    from distill.cli.options import parse, sort_words

    words = sort_words(argv, keys_of(command.config))
    config: Any = parse(name, command.config, words)
    if "print_config" in words.flags:
        from distill.runs import config_yaml

        print(config_yaml(config), end="")
        return 0
    if not debug:
        _quiet_libraries()
    command.call(config)
    return 0


def _help() -> str:
    parser = argparse.ArgumentParser(
        prog="draftsmith",
        usage="draftsmith COMMAND [--config FILE] [--KEY VALUE ...]",
        description=importlib.metadata.metadata("draftsmith")["Summary"],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="draftsmith COMMAND --help lists every key of a command with its meaning and default.",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    group = parser.add_argument_group("commands")
    for name, command in COMMANDS.items():
        group.add_argument(name, nargs="?", help=command.summary)
    return parser.format_help().rstrip()


def _unknown_command(word: str) -> str:
    near = difflib.get_close_matches(word, COMMANDS, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{word}: unknown command; {hint}commands: {', '.join(COMMANDS)}"


def _quiet_libraries() -> None:
    """Keep the libraries' own warnings, notices and loading bars from users; a download keeps its bar."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.simplefilter("ignore")
    libraries = ("lightning", "lightning.pytorch", "lightning.fabric", "lightning_utilities")
    for name in (*libraries, "torchao", "torch.utils._pytree"):  # the last two speak when torchao is merely there
        logging.getLogger(name).setLevel(logging.ERROR)
    import huggingface_hub.utils
    import transformers.utils.logging

    transformers.utils.logging.disable_progress_bar()
    huggingface_hub.utils.enable_progress_bars()


def _outcome(error: BaseException) -> tuple[int, str]:
    """Exit status and line for an error that ended a command; an empty line prints nothing."""
    if isinstance(error, SystemExit):
        if isinstance(error.__context__, KeyboardInterrupt):  # lightning turns one into the other
            return _outcome(error.__context__)
        return error.code if isinstance(error.code, int) else int(error.code is not None), ""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted"
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter's last flush complains
        return 1, ""
    if isinstance(error, DraftsmithError):
        return error.exit_status, " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror:
        return 1, f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    first = str(error).strip().partition("\n")[0][:300]
    return 1, f"{type(error).__name__}: {first} (--debug shows where)"


if __name__ == "__main__":
    sys.exit(main())
