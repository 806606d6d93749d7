"""The examples run as their readers would run them, and the pages name what there is."""

import dataclasses
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fedsap import presets
from fedsap.config import SECTIONS, TOP, assignments, options, resolve
from fedsap.methods import METHODS
from fedsap.report.content import command
from fedsap.report.read import read
from fedsap.runs import flat

ROOT = Path(__file__).parents[1]
METHOD_PAGES = sorted((ROOT / "docs/methods").glob("*.md"))
PAGES = [ROOT / "docs/choices.md", *METHOD_PAGES]
MORE = [ROOT / "docs/robust.md", ROOT / "docs/privacy.md"]  # what they say is not for all methods

page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
any_page = pytest.mark.parametrize("page", [*PAGES, *MORE], ids=lambda path: path.stem)
method = pytest.mark.parametrize("name", METHODS)


def python(*words, out):
    return subprocess.run(
        [sys.executable, "-W", "error", *map(str, words), "--out", str(out)],
        cwd=ROOT / "examples",
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def heads(printed):
    """Head accuracy, %, by method, out of the printed table, whatever its frame."""
    rows = re.findall(r"^\W*([A-Z]\w+)\W+([\d.]+) ?± ?[\d.]+", printed, re.MULTILINE)
    return {title: float(head) for title, head in rows}


def test_own_method_prints_its_row_beside_fedproto(tmp_path):
    words = ["run", "--method", "own_method:Angle", "--method", "fedproto", "--set", "train.rounds=20"]
    done = python("-m", "fedsap.cli", *words, out=tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(heads(done.stdout)) == ["Angle", "FedProto"]
    assert "angle 0." in done.stderr  # its loss term is at work
    again = command(read(tmp_path / "angle-1234"), [1234])
    assert again.startswith("fedsap run --method own_method:Angle --seed 1234 ")


def test_own_model_is_trained_and_sends_prototypes_of_its_size(tmp_path):
    words = ["run", "--set", "model.name=own_model:build", "--set", "train.rounds=10"]
    done = python("-m", "fedsap.cli", *words, out=tmp_path)
    assert done.returncode == 0, done.stderr
    assert heads(done.stdout)["FedSAP"] > 80
    assert "2.8 k" in done.stdout  # 59 prototypes of 48 numbers


def known(key):
    """Whether a key as people write it exists: section.key, method.name, method.option or method.NAME.option."""
    section, *path = key.split(".")
    if section != "method":
        return len(path) == 1 and path[0] in SECTIONS[section].model_fields
    if len(path) == 1:
        return path[0] == "name" or any(path[0] in options(m) for m in METHODS.values())
    return len(path) == 2 and path[0] in METHODS and path[1] in options(METHODS[path[0]])


def keys(text):
    """The configuration keys in the code of a page, in spans and in blocks."""
    code = re.findall(r"```sh\n(.*?)```", text, re.DOTALL) + re.findall(r"`([^`\n]+)`", text)
    name = rf"(?<![\w./-])(?:{'|'.join([*SECTIONS, 'method'])})(?:\.\w+)+"
    return [key for piece in code for key in re.findall(name, piece)]


@pytest.mark.parametrize(
    ("key", "there"),
    [
        ("train.rounds", True),
        ("train.round", False),
        ("train.rounds.more", False),
        ("method.name", True),
        ("method.proxy", True),
        ("method.fedsap.proxy", True),
        ("method.fedavg.proxy", False),
        ("method.other.proxy", False),
    ],
)
def test_keys_are_told_apart(key, there):
    assert known(key) is there


@any_page
def test_every_key_on_a_page_exists(page):
    found = keys(page.read_text(encoding="utf-8"))
    assert found
    assert [key for key in found if not known(key)] == []


@any_page
def test_every_command_on_a_page_is_understood(page):
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        for line in block.splitlines():
            command, what, *words = shlex.split(line)
            assert (command, what) == ("fedsap", "run"), line
            given = {"--set": [], "--method": [], "--seed": [], "--out": []}
            for flag, value in zip(words[::2], words[1::2], strict=True):
                given[flag].append(value)
            assert resolve(assignments(given["--set"]), given["--method"], [int(s) for s in given["--seed"]])


@page
def test_every_assignment_on_a_page_is_valid(page):
    spans = re.findall(r"`((?:[a-z_]+\.)+[a-z_]+=[^` ]+)`", page.read_text(encoding="utf-8"))
    refused = {"method.fedproto.align=0", "method.fedmps.soft=0"}  # and the pages say so
    for pair in set(spans) - refused:
        assert resolve(assignments(["unlabelled.size=8", pair]), list(METHODS)), pair


def test_there_is_a_page_for_every_method():
    assert [path.stem for path in METHOD_PAGES] == sorted(METHODS)


@method
def test_options_of_a_method_are_all_on_its_page_with_their_defaults(name):
    def said(value):
        return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

    text = (ROOT / f"docs/methods/{name}.md").read_text(encoding="utf-8")
    rows = re.findall(rf"^\| `method\.{name}\.(\w+)` \| (.+?) \| (.+?) \|$", text, re.MULTILINE)
    fields = dataclasses.fields(METHODS[name])
    assert rows == [(f.name, said(f.default), f.metadata["about"]) for f in fields]


@pytest.mark.parametrize(
    ("heading", "layers"),
    [
        ("Presets", {name or "all": layer for name, layer in presets.REFERENCE.items()}),
        ("Values per data set", presets.DATASETS),
    ],
)
def test_presets_are_as_the_page_has_them(heading, layers):
    text = (ROOT / "docs/choices.md").read_text(encoding="utf-8")
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| (\w+) \| (`.*) \|$", section, re.MULTILINE))
    assert {name: set(re.findall(r"`([^`]+)`", cell)) for name, cell in rows.items()} == {
        name: {f"{key}={value}".replace("True", "true").replace("False", "false") for key, value in layer_keys(layer)}
        for name, layer in layers.items()
    }


def layer_keys(layer):
    """Keys and values of a layer; what a method needs of the model stands under model."""
    return [("model." + k.partition(".model.")[2] if ".model." in k else k, v) for k, v in flat(layer).items()]


def test_the_paper_preset_is_empty():
    assert presets.PRESETS["paper"] == {}


def test_top_level_keys_on_the_choices_page():
    text = (ROOT / "docs/choices.md").read_text(encoding="utf-8")
    assert [key for key in ("preset", "seeds") if f"`{key}`" in text and key in TOP] == ["preset", "seeds"]
