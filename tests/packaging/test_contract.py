"""The stable Python contract of docs/api.md: names, parameters, order and defaults as documented."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import exl3

ROOT = Path(__file__).parents[2]
TABLE = re.findall(r"^\| `(exl3\.[\w.]+)` \| `(\(.*\))` \| (?:`(.*)` )?\|$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
ROWS = {name: signature for name, signature, _ in TABLE}
RETURNS = {name: returned.replace("\\|", "|") for name, _, returned in TABLE if returned}


def parameters(text: str) -> list[tuple[str, str, str]]:
    """(name, kind, default) of a signature in words."""
    args = ast.parse(f"def f{text}: pass").body[0].args
    out = []
    places = [None] * (len(args.args) - len(args.defaults)) + list(args.defaults)
    out += [(a.arg, "place", ast.unparse(d) if d is not None else "") for a, d in zip(args.args, places)]
    out += [(args.vararg.arg, "*", "")] if args.vararg else []
    out += [(a.arg, "keyword", ast.unparse(d) if d is not None else "") for a, d in zip(args.kwonlyargs, args.kw_defaults)]
    return out + ([(args.kwarg.arg, "**", "")] if args.kwarg else [])


def actual(function) -> list[tuple[str, str, str]]:
    kinds = {"POSITIONAL_OR_KEYWORD": "place", "VAR_POSITIONAL": "*", "KEYWORD_ONLY": "keyword", "VAR_KEYWORD": "**"}
    found = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    return [(p.name, kinds[p.kind.name], "" if p.default is p.empty else repr(p.default)) for p in found]


def lookup(name: str):
    value = exl3
    for part in name.split(".")[1:]:
        value = getattr(value, part)
    return value


def compatible(documented, found) -> bool:
    """Documented parameters keep their places and defaults; further ones must be optional and come after."""
    places, keywords = ([p for p in documented if p[1] == kind] for kind in ("place", "keyword"))
    found_places = [p for p in found if p[1] == "place"]
    if found_places[: len(places)] != places or any(p[2] == "" for p in found_places[len(places) :]):
        return False
    named = {p[0]: p for p in found}
    return all(named.get(p[0], ("", "", ""))[2] == p[2] for p in keywords) and all(p in found for p in documented if p[1] in ("*", "**"))


@pytest.mark.parametrize("name", ROWS)
def test_signature_is_the_documented_one(name):
    assert compatible(parameters(ROWS[name]), actual(lookup(name))), f"{name}{ROWS[name]} is now {inspect.signature(lookup(name))}"


@pytest.mark.parametrize("name", RETURNS)
def test_result_is_of_the_documented_type(name):
    assert inspect.signature(lookup(name)).return_annotation == RETURNS[name]


def test_generate_takes_what_the_engine_s_function_takes():
    """`Model.generate` cannot name the engine's parameters one by one, so what it does name must agree."""
    own, engine = ({p[0]: p[2] for p in actual(lookup(n))} for n in ("exl3.Model.generate", "exl3.generate.generate"))
    assert all(engine[name] == default for name, default in own.items() if name not in ("args", "options"))
    assert [*own][:3] == [*engine][1:4] == ["prompt", "max_new_tokens", "temperature"]


def test_the_contract_covers_what_the_project_promises():
    promised = {"load", "Model.logits", "Model.generate", "Tokenizer.from_directory", "codec.decode", "codec.dequantize", "codec.unpack"}
    promised |= {"codec.pack", "convert", "evaluate.compare"}
    assert {f"exl3.{p}" for p in promised} <= set(ROWS)


def test_breaks_would_be_noticed():
    old = parameters("(path, device=None)")
    assert compatible(old, parameters("(path, device=None, more=1)"))
    assert not compatible(old, parameters("(path, more, device=None)"))
    assert not compatible(old, parameters("(path, device='cpu')"))
    assert not compatible(old, parameters("(device=None)"))


def test_exceptions():
    from exl3 import errors

    bases = {
        "FormatError": ValueError,
        "MissingTensorError": errors.FormatError,
        "UnsupportedError": NotImplementedError,
        "ArgumentError": ValueError,
        "NumericalError": ArithmeticError,
        "ResourceError": RuntimeError,
        "BackendError": RuntimeError,
        "JobError": RuntimeError,
    }
    for name, base in bases.items():
        assert issubclass(getattr(errors, name), base) and issubclass(getattr(errors, name), errors.Exl3Error), name


def test_one_version():
    """src/exl3/__init__.py alone: pyproject.toml and CMake read it there."""
    assert "version = " not in (ROOT / "pyproject.toml").read_text().split("[project.scripts]")[0].replace('dynamic = ["version"]', "")
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", exl3.__version__)
    assert f"## {'.'.join(exl3.__version__.split('.')[:3])}" in (ROOT / "CHANGELOG.md").read_text()
