"""Each mistake on the command line or in a config file: one line that names key, value and what is legal; status 2."""

from collections.abc import Callable
from pathlib import Path

import pytest

from distill.cli import main as cli
from distill.cli.keys import keys_of
from tests.command_lines import EVAL, EXPORT, FIT, INIT, RUN, stub_commands


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command line that must be refused; returns its one line. `text` becomes the --config file."""
    calls = stub_commands(monkeypatch)

    def run(*argv: str, text: str | None = None) -> str:
        if text is not None:
            (tmp_path / "run.yaml").write_text(text)
            argv = (argv[0], "--config", str(tmp_path / "run.yaml"), *argv[1:])
        assert cli.main(argv) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith(f"draftsmith {argv[0]}: ")
        assert printed.err.count("\n") == 1, "one line, without a traceback or the parser's usage"
        assert not calls
        return printed.err.replace(f"{tmp_path}/", "")

    return run


@pytest.mark.parametrize(
    ("added", "line"),
    [
        ("optimizer:\n  learning_rat: 1\n", "run.yaml:8: optimizer.learning_rat: unknown key; did you mean {lr}?"),
        ("optimizer:\n  learning-rate: 1\n", "run.yaml:8: optimizer.learning-rate: unknown key; did you mean {lr}?"),
        ("learning_rate: 1\n", "run.yaml:7: learning_rate: unknown key; did you mean {lr}?"),
        ("teacher:\n  learning_rate: 1\n", "run.yaml:8: teacher.learning_rate: unknown key; did you mean {lr}?"),
        ("optimiser:\n  learning_rate: 1\n", "run.yaml:7: optimiser: unknown key; did you mean optimizer?"),
        ("judge:\n  decode:\n    sampling: {temp: 1}\n", "did you mean judge.decode.sampling.temperature?"),
        ("judge:\n  decode:\n    draft_sampling: {temp: 1}\n", "did you mean judge.decode.draft_sampling.temperature?"),
        ("nonsense: 1\n", "nonsense: unknown key; legal at the top level: target, draft, output"),
        ("loss:\n  nonsense: 1\n", "loss.nonsense: unknown key; legal in section loss: name, temperature"),
        ("max_steps: 4\n", "run.yaml:7: max_steps: given twice, first at run.yaml:4"),
        ("data:\n  train: [b]\n", "run.yaml:7: data: given twice, first at run.yaml:5"),
        ("data.train: [b]\n", "run.yaml:7: data.train: given twice, first at run.yaml:6"),
        ("trainer: {devices: 1, devices: 2}\n", "trainer.devices: given twice"),
        (" seed: 1\n", "run.yaml:7: not valid YAML"),
        ("\tseed: 1\n", "run.yaml:7: not valid YAML"),
        ("seed: [1\n", "not valid YAML"),
        ("--- \nseed: 1\n", "not valid YAML"),
        ("optimizer:\n", "run.yaml:7: optimizer: a value without keys is not legal; expected a section with"),
        ("optimizer: 3\n", "run.yaml:7: optimizer: 3 is not legal; expected a section"),
        ("[a]: 1\n", "run.yaml:7:"),
        ("trainer: &t {a: *t}\n", "nested too deeply"),
        ("seed: !!python/object/apply:os.getcwd []\n", "run.yaml:7: not valid YAML: could not determine a constructor"),
    ],
)  # fmt: skip
def test_b01_a_key_that_is_not_legal_is_named_with_the_likely_one(
    refused: Callable[..., str], added: str, line: str
) -> None:
    assert line.format(lr="optimizer.learning_rate") in refused("fit", text=FIT + added)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--learning_rat", "1"], "--learning_rat: unknown option; did you mean --optimizer.learning_rate?"),
        (["--optimizer.lr", "1"], "--optimizer.lr: unknown option; "),
        (["--teacher.learning-rate", "1"], "did you mean --optimizer.learning_rate?"),
        (["--targ", "t"], "--targ: unknown option; did you mean --target?"),
        (["--optimizer", "x.yaml"], "--optimizer: is a section; give its keys: --optimizer.learning_rate,"),
        (["--seed"], "--seed: needs a value"),
        (["--seed", "1", "2"], "2: unexpected after --seed 1"),
        (["--config"], "--config: needs a value"),
        (["--help", "1"], "--help: takes no value"),
    ],
)
def test_b01_an_option_that_is_not_legal_is_named_with_the_likely_one(
    refused: Callable[..., str], words: list[str], line: str
) -> None:
    assert line in refused("fit", *words, text=FIT)


@pytest.mark.parametrize(
    ("added", "line"),
    [
        ("optimizer: {learning_rate: abc}\n", "run.yaml:7: {lr}: abc is not legal; expected a number"),
        ("optimizer: {learning_rate: .nan}\n", "run.yaml:7: {lr}: nan is not legal; expected a finite number > 0"),
        ("loss: {temperature: 0.009}\n", "loss.temperature: 0.009 is not legal; expected a number from 0.01 to 1000"),
        ("loss: {temperature: 1001}\n", "loss.temperature: 1001"),
        ("judge: {decode: {max_new_tokens: 0}}\n", "run.yaml:7: judge.decode.max_new_tokens: 0 is not legal"),
        ("optimizer: {betas: [0.9]}\n", "optimizer.betas: [0.9] is not legal; expected a list of 2, each a number"),
        ("seed: true\n", "run.yaml:7: seed: True is not legal; expected an integer"),
        ("seed: 2.5\n", "seed: 2.5 is not legal; expected an integer"),
        ("max_epochs: many\n", "max_epochs: many is not legal; expected an integer or null"),
        ("teacher: {kind: onlin}\n", "teacher.kind: onlin is not legal; expected one of online, cached"),
        ("trainer: 3\n", "trainer: 3 is not legal; expected a mapping"),
        ("judge: {decode: {draft_sampling: {top_p: x}}}\n", "draft_sampling.top_p: x is not legal; expected a number"),
        ("model: {device: 3}\n", "model.device: 3 is not legal; expected a string"),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_refused(refused: Callable[..., str], added: str, line: str) -> None:
    assert line.format(lr="optimizer.learning_rate") in refused("fit", text=FIT + added)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([*RUN, "--decode.num_speculative_tokens", "-1"], "decode.num_speculative_tokens: -1 is not legal; expected"),
        ([*RUN, "--decode.num_speculative_tokens", "65"], "decode.num_speculative_tokens: 65 is not legal"),
        ([*RUN, "--decode.num_speculative_tokens", "two"], "decode.num_speculative_tokens: two is not legal; expected"),
        ([*RUN, "--decode.max_new_tokens", "-1"], "decode.max_new_tokens: -1 is not legal; expected an integer >= 0"),
        ([*RUN, "--decode.sampling.temperature", "-1"], "decode.sampling.temperature: -1.0 is not legal"),
        ([*RUN, "--decode.sampling.top_p", "0"], "decode.sampling.top_p: 0.0 is not legal; expected a number in"),
        ([*RUN, "--decode.sampling.top_k", "-1"], "decode.sampling.top_k: -1 is not legal"),
        ([*RUN, "--decode.draft_sampling.min_p", "2"], "decode.draft_sampling.min_p: 2.0 is not legal"),
        ([*RUN, "--decode.draft_length", "tree"], "decode.draft_length: 'tree' is not legal; expected one of fixed,"),
        ([*RUN, "--decode.seed", "-1"], "decode.seed: -1 is not legal"),
        ([*EVAL, "--decode.max_new_tokens", "0"], ": decode.max_new_tokens: 0 is not legal; expected an integer >= 1"),
        ([*INIT, "--hidden_size", "16392"], "hidden_size: 16392 is not legal; expected an integer from 8 to 16384"),
        ([*INIT, "--hidden_size", "0"], "hidden_size: 0 is not legal; expected an integer from 8 to 16384"),
        ([*INIT, "--num_layers", "513"], "num_layers: 513 is not legal; expected an integer from 1 to 512"),
        ([*EVAL, "--num_prompts", "0"], "num_prompts: 0 is not legal; expected an integer >= 1"),
        ([*EVAL, "--drafts", "[]"], "drafts: [] is not legal; expected at least one draft"),
        ([*EVAL, "--repeats", "0"], "repeats: 0 is not legal"),
        ([*EXPORT, "--num_assistant_tokens", "0"], "num_assistant_tokens: 0 is not legal"),
        ([*INIT, "--seed", "-1"], "seed: -1 is not legal"),
        ([*INIT, "--hidden_size", "64", "--fit_cost_ratio", "0.1"], "give only one of num_parameters, fit_cost_ratio"),
        ([*INIT, "--draft_vocab_size", "100"], "draft_vocab_size: needs data"),
        ([*INIT, "--data", "a.jsonl"], "data: needs draft_vocab_size"),
        ([*INIT, "--seed", str(2**63)], "seed: 9223372036854775808 is not legal"),
        ([*EVAL, "--skip_prompts", "-1"], "skip_prompts: -1 is not legal; expected an integer >= 0"),
        ([*EXPORT, "--model.device", "cpu"], "--model.device: unknown option"),
        ([*EXPORT, "--model.backend", "eager"], "--model.backend: unknown option"),
    ],
)  # fmt: skip
def test_d57_a_meaningless_setting_is_refused_by_its_full_name(
    refused: Callable[..., str], words: list[str], line: str
) -> None:
    assert line in refused(*words)


@pytest.mark.parametrize(
    ("name", "key"), [(n, k) for n, c in cli.COMMANDS.items() for k, t in keys_of(c.config).leaves.items()]
)
def test_every_key_refuses_what_it_cannot_be(refused: Callable[..., str], name: str, key: str) -> None:
    keys = keys_of(cli.COMMANDS[name].config)
    value = "[1, [2]]" if keys.is_mapping(key) else "{no: {such: value}}"
    assert f"run.yaml:1: {key}: " in refused(name, text=f"{key}: {value}\n")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "run.yaml: expected a mapping"),
        ("- a\n", "run.yaml: expected a mapping"),
        ("target: t\n", "missing: draft, output, data.train; give each as an option or in the --config file"),
        (FIT + "max_epochs: 1\n", "max_steps, max_epochs: give exactly one of the two"),
    ],
)
def test_a_config_that_lacks_something_says_what(refused: Callable[..., str], text: str, line: str) -> None:
    assert line in refused("fit", text=text)


def test_b03_a_config_file_that_is_not_there_is_named(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "config: nowhere.yaml does not exist" in refused("fit", "--config", "nowhere.yaml")
    assert "Is a directory" in refused("fit", "--config", str(tmp_path))
    (tmp_path / "latin").write_bytes(b"target: \xfc\n")
    assert "latin: not UTF-8 text (byte 8)" in refused("fit", "--config", str(tmp_path / "latin"))


def test_an_option_mends_a_wrong_value_of_the_file_and_is_then_the_one_blamed(refused: Callable[..., str]) -> None:
    line = refused("fit", "--seed", "-2", text=FIT + "seed: -1\n")
    assert line == "draftsmith fit: seed: -2 is not legal; expected an integer >= 0\n"
