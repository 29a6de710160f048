"""Studies: what a file may contain, what is refused, and that writing and reading a study loses nothing."""

from __future__ import annotations

import re
import tomllib
import warnings
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from defedavg.algorithms import ALGORITHMS
from defedavg.compat import RenamedWarning
from defedavg.config import study as config
from defedavg.config.build import make_simulator
from defedavg.errors import UserError
from helpers.command_line import refused
from helpers.user_errors import line_of

EXAMPLE = """
name = "first"
algorithms = ["fedavg", "fedbuff", "defedavg-niid"]
seeds = [0, 1, 2]
[task]
data = "mnist5k"
model = "cnn"
split = "classes"
classes_per_client = 2
[clients]
num_clients = 100
profile = "paper-fashionmnist"
[training]
updates_per_round = [10, 20]
local_steps = 50
batch_size = 10
global_lr = 0.1
local_lr = 0.05
[stop]
target_accuracy = 0.8
max_rounds = 2000
"""


def example(tmp_path: Path, text: str = EXAMPLE) -> Path:
    path = tmp_path / "first.toml"
    path.write_text(text)
    return path


def test_the_documented_example(tmp_path: Path) -> None:
    study = config.load(example(tmp_path))
    assert (study.name, study.algorithms, study.seeds) == ("first", ("fedavg", "fedbuff", "defedavg-niid"), (0, 1, 2))
    points = study.points()
    assert [(p.settings.algorithm, p.settings.training.updates_per_round) for p in points] == [
        (name, n) for name in study.algorithms for n in (10, 20)
    ]
    assert points[1].label == "fedavg updates_per_round=20"
    assert points[0].settings.training.global_lr == 0.1
    assert points[0].settings.clients.step_seconds == 0.0017
    assert points[0].settings.stop.max_rounds == 2000


def test_writing_and_reading_gives_the_same_study(tmp_path: Path) -> None:
    text = EXAMPLE + '[fedbuff]\nconcurrency = [5, 50]\nlocal_lr = 0.01\n[favano]\nreweight = "deterministic"\n'
    study = config.load(example(tmp_path, text))
    again = config.study(tomllib.loads(study.to_toml()))
    assert again == study
    assert again.points() == study.points()
    fedbuff = [p for p in study.points() if p.settings.algorithm == "fedbuff"]
    assert len(fedbuff) == 4
    assert {p.settings.algorithm_settings.concurrency for p in fedbuff} == {5, 50}
    assert {p.settings.training.local_lr for p in fedbuff} == {0.01}
    assert all(p.settings.training.local_lr == 0.05 for p in study.points() if p.settings.algorithm != "fedbuff")


def test_profiles_give_defaults(tmp_path: Path) -> None:
    text = '[clients]\nprofile = "paper-cifar10"\nmodel_megabytes = 9\n'
    clients = config.load(example(tmp_path, text)).points()[0].settings.clients
    assert (clients.step_seconds, clients.model_megabytes) == (0.00314, 9.0)


def test_overrides(tmp_path: Path) -> None:
    study = config.load(
        example(tmp_path),
        (
            "training.updates_per_round=5",
            "seeds=[7]",
            "task.split=iid",
            "name='other'",
            "clients.slowness=two-speed(0.1, 9)",
        ),
    )
    (first, *_) = study.points()
    assert (study.name, study.seeds, first.settings.task.split) == ("other", (7,), "iid")
    assert first.settings.training.updates_per_round == 5
    assert first.settings.clients.slowness == "two-speed(0.1, 9)"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trainin = 3", "did you mean 'training'"),
        ("[training]\nlocal_step = 3", "did you mean 'local_steps'"),
        ("[clients]\nslownes = 'equal'", "did you mean 'slowness'"),
        ("[fedbuff]\nconcurency = 3", "did you mean 'concurrency'"),
        ("algorithms = ['fedbuf']", "did you mean 'fedbuff'"),
        ("algorithms = []", "algorithms is empty"),
        ("algorithms = ['fedavg', 'fedavg']", "twice"),
        ("seeds = ['a']", "a whole number"),
        ("seeds = [1.5]", "a whole number"),
        ("seeds = [0, 18446744073709551616]", "a seed must be from 0 to 18446744073709551615"),
        ("seeds = [-1]", "seeds has -1; a seed must be from 0"),
        ("name = '../up'", "letters, digits"),
        ("name = ''", "letters, digits"),
        ("training = 3", "must be a table"),
        ("[training]\nlocal_steps = 0", "local_steps is 0"),
        ("[training]\nlocal_steps = 2.5", "a whole number"),
        ("[training]\nlocal_steps = true", "a whole number"),
        ("[training]\nlocal_lr = -0.1", "above zero"),
        ("[training]\nglobal_lr = [0.1, 0]", "above zero"),
        ("[training]\nlocal_lr = nan", "a number"),
        ("[training]\nlocal_lr = inf", "training.local_lr is inf; a learning rate must be finite"),
        ("[training]\nserver_epsilon = inf", "training.server_epsilon is inf; it must be above zero, and finite"),
        ("local_steps = 5", "unknown key 'local_steps'; did you mean 'training.local_steps'"),
        ("concurrency = 5", "write it as TABLE.concurrency, with one of the tables ace, .*fedbuff"),
        ("[training]\nbatch_size = 0", "batch_size is 0"),
        ("[training]\nsampling = 'all'", "unknown sampling"),
        ("[training]\nupdates_per_round = []", "empty"),
        ("[clients]\nnum_clients = 0", "num_clients is 0"),
        ("[clients]\nprofile = 'paper'", "unknown profile"),
        ("[clients]\nslowness = 'unifrom(1, 2)'", "did you mean 'uniform'"),
        ("[clients]\nslowness = 'uniform(5, 1)'", "out of range"),
        ("[clients]\navailability = 'often'", r"windows\(on_seconds, off_seconds\)"),
        ("[clients]\ntrace = 'gone.csv'", "gone.csv does not exist"),
        ("[stop]\ntarget_accuracy = 80", "a share"),
        ("[stop]\nmax_rounds = 0", "max_rounds is 0"),
        ("[defedavg-niid]\nmode = 'lazy'", "unknown mode"),
        ("[favano]\nwait_seconds = -1.0", "wait_seconds is -1.0"),
        ("[fedbuff]\nstaleness = 'cubic'", "unknown staleness"),
        ("[task\n", "not valid TOML: .*line 1"),
        ("a = 1\nb = = 2", "line 2"),
    ],
)
def test_bad_files_are_one_clear_line(tmp_path: Path, text: str, words: str) -> None:
    algorithms = "" if "algorithms" in text else "algorithms = ['fedbuff', 'favano', 'defedavg-niid']\n"
    path = example(tmp_path, text if text.startswith(("[task\n", "a = 1")) else algorithms + text)
    with pytest.raises(UserError) as error:
        config.load(path)
    assert re.search(words, str(error.value))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text", ["", "a", "a=1=2", ".a=1", "a.b.c=1", "training=1", "training.local_steps=", "seeds.x=1"]
)
def test_bad_overrides(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError) as error:
        config.load(example(tmp_path), (text,))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("local_steps=5", "unknown key 'local_steps'; did you mean 'training.local_steps'?"),
        ("algorithms=[fedavg]", "names in a list need quotes: --set \"algorithms=['fedavg']\""),
        ("algorithms=[fedavg, 'fedbuff']", "--set \"algorithms=['fedavg', 'fedbuff']\""),
        ("task.model=[it's]", "not a list of TOML"),
    ],
)
def test_overrides_that_need_a_table_or_quotes_name_the_right_form(tmp_path: Path, text: str, words: str) -> None:
    assert words in line_of(lambda: config.load(example(tmp_path), (text,)))


def test_a_file_that_is_not_utf_8_says_how_to_save_it(tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    path.write_bytes('name = "größe"'.encode("latin-1"))
    assert line_of(lambda: config.load(path)) == f"the configuration {path} is not UTF-8; save it as UTF-8"
    assert refused("deploy", "serve", path, "--insecure", "--listen", "127.0.0.1:0").endswith(
        "is not UTF-8; save it as UTF-8"
    )


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no configuration file"):
        config.load(tmp_path / "none.toml")


def test_a_trace_gives_the_number_of_clients_and_is_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "fleet.csv").write_text("client,step_seconds,up_mbps,down_mbps\n1,0.1,5,5\n0,0.2,5,5\n")
    settings = config.load(example(tmp_path, "[clients]\ntrace = 'fleet.csv'\n")).points()[0].settings
    assert settings.clients.num_clients == 2


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
names = st.sampled_from([*config.TOP_KEYS, *ALGORITHMS, "local_steps", "trace", "module", "hits"])


@hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
@given(st.dictionaries(names, values | st.dictionaries(names, values, max_size=3), max_size=4))
def test_any_input_is_a_study_or_a_user_error(found: dict[str, Any]) -> None:
    for read in (config.study, config.stored_study):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RenamedWarning)
                study = read(found)
        except UserError:
            continue
        if read is config.study:
            assert study.points()
            assert config.stored_study(tomllib.loads(study.to_toml())) == study


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[clients]\nslowness = 'lognormal(1000)'", "some client needs"),
        ("[clients]\nslowness = 'pareto(0.001)'", "some client needs"),
        ("[clients]\nmodel_megabytes = 1e308", "some client needs"),
        ("[clients]\nstep_seconds = 1e-320", "some client needs"),
        ("[clients]\njitter = 1e200", "jitter"),
        ("[training]\ntimeout_seconds = 0.001", "the fastest client needs"),
    ],
)
def test_extreme_values_are_refused_when_the_simulator_is_made(tmp_path: Path, text: str, words: str) -> None:
    settings = config.load(example(tmp_path, text)).points()[0].settings
    with pytest.raises(UserError, match=words):
        make_simulator(settings, 0)


@pytest.mark.parametrize("text", [f"seeds = {'9' * 5000}", "[training]\nlocal_lr = " + "9" * 400, "a = " + "[" * 3000])
def test_hostile_numbers_and_nesting(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError) as error:
        config.load(example(tmp_path, text))
    assert len(str(error.value)) < 400


def test_a_profile_of_the_command_line_replaces_values_of_the_file(tmp_path: Path) -> None:
    saved = config.load(example(tmp_path)).to_toml()
    study = config.load(example(tmp_path, saved), ("clients.profile=paper-cifar10",))
    assert study.points()[0].settings.clients.step_seconds == 0.00314
    both = ("clients.profile=paper-cifar10", "clients.step_seconds=0.5")
    assert config.load(example(tmp_path, saved), both).points()[0].settings.clients.step_seconds == 0.5


def test_numpy_numbers_are_numbers() -> None:
    study = config.study({"training": {"local_steps": np.int64(3), "local_lr": np.float32(0.5)}})
    assert study.points()[0].settings.training.local_steps == 3
    assert study.points()[0].settings.training.local_lr == 0.5


@pytest.mark.parametrize("value", ["0.5", "[0.5, 2]"])
def test_a_number_in_the_place_of_a_text_is_answered_with_an_example(tmp_path: Path, value: str) -> None:
    with pytest.raises(
        UserError, match=r"clients\.slowness is 0\.5; it must be text in quotes, such as 'uniform\(1, 5\)'"
    ):
        config.load(example(tmp_path, f"[clients]\nslowness = {value}"))
