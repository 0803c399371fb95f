"""Builds the documentation site and checks it: dead links and anchors, and every code sample.

    python .github/scripts/docs.py --out site [--keep]      # --keep: add to what the folder holds
    python .github/scripts/docs.py --samples                # the samples alone; needs exl3 and torch in this Python

Links between pages and to anchors are checked by Sphinx, whose warnings are errors. Links to files of the repository must exist; on the
site they lead to the repository. Python samples must compile and name things that exl3 has; `exl3` and `make` command lines must parse
against the real options.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import shlex
import shutil
import sys
from pathlib import Path

import common

DOCS = common.ROOT / "docs"
# the site's contents; a page that is on no list is an error
NAVIGATION = {
    "Getting started": ["install", "quickstart"],
    "Guides": ["convert", "choosing_bits", "quality", "embedding", "serving", "models", "cuda", "rocm"],
    "Reference": ["api", "env_vars", "format", "files"],
    "Development": ["architecture", "CONTRIBUTING", "SECURITY", "CHANGELOG"],
}
LOOSE = ["CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"]
REPOSITORY = "https://github.com/exl3-project/exl3/blob/main/"
SITE_PAGES = common.WORK / "docs"
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")


def pages() -> dict[str, Path]:
    """Site name -> source. README.md is the front page."""
    found = {p.name: p for p in sorted(DOCS.glob("*.md"))} | {name: common.ROOT / name for name in LOOSE}
    return {"index.md": common.ROOT / "README.md"} | found


def blocks(text: str) -> list[tuple[str, str, int]]:
    """(language, code, line) of the fenced code blocks of a page."""
    out = []
    for found in re.finditer(r"^```(\w*)[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        out.append((found[1], found[2], text[: found.start()].count("\n") + 1))
    return out


def gather() -> list[str]:
    """Copies the pages below .whl, links rewritten for the site; returns dead links to files of the repository."""
    dead = []
    shutil.rmtree(SITE_PAGES, ignore_errors=True)
    SITE_PAGES.mkdir(parents=True)
    known = pages()
    for name, source in known.items():

        def rewrite(found: re.Match[str], source: Path = source) -> str:
            label, target = found[1], found[2]
            path, _, anchor = target.partition("#")
            if re.match(r"[a-z]+:", target) or not path:
                return found[0]
            anchor = f"#{anchor}" if anchor else ""
            there = (source.parent / path).resolve()
            for page, file in known.items():
                if there == file or (source.parent == DOCS and path == page):
                    return f"[{label}]({page}{anchor})"
            if not there.exists() or common.ROOT not in there.parents:
                dead.append(f"{source.name}: dead link {target}")
                return label
            return f"[{label}]({REPOSITORY}{there.relative_to(common.ROOT)}{anchor})"

        (SITE_PAGES / name).write_text(LINK.sub(rewrite, source.read_text()))
    with (SITE_PAGES / "index.md").open("a") as front:
        for caption, names in NAVIGATION.items():
            listed = "\n".join(n for n in names if f"{n}.md" in known)
            front.write(f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{listed}\n```\n")
    for picture in DOCS.glob("*.png"):
        for folder in (SITE_PAGES, SITE_PAGES / "docs"):  # as the pages of docs/ name it, and as the README does
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(picture, folder)
    return dead


def check_python(code: str) -> list[str]:
    """Syntax, and every name taken from exl3."""
    try:
        tree = ast.parse(code)
    except SyntaxError as e:
        return [f"line {e.lineno}: {e.msg}"]
    wrong = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "exl3":
            module = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    try:
                        importlib.import_module(f"{node.module}.{alias.name}")
                    except ImportError:
                        wrong.append(f"{node.module} has no {alias.name}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "exl3":
                    importlib.import_module(alias.name)
        elif isinstance(node, ast.Attribute):
            chain, inner = [node.attr], node.value
            while isinstance(inner, ast.Attribute):
                chain.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id == "exl3":
                value = importlib.import_module("exl3")
                for part in reversed(chain):
                    if not hasattr(value, part):
                        wrong.append(f"exl3.{'.'.join(reversed(chain))} does not exist")
                        break
                    value = getattr(value, part)
    return wrong


def check_command(line: str) -> list[str]:
    """A shell line: verbs and options of `exl3`, targets of make."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_0-9]+=.*", words[0]):
        words = words[1:]
    if words[:3] == ["python", "-m", "exl3"]:
        words = ["exl3", *words[3:]]
    if not words:
        return []
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (common.ROOT / "Makefile").read_text(), re.MULTILINE)
        return [f"make has no target {w}" for w in words[1:] if "=" not in w and w not in targets]
    if words[0] != "exl3" or len(words) == 1 or words[1].startswith("-"):
        return []
    import exl3.cli

    if words[1] not in exl3.cli.VERBS:
        return [f"no verb exl3 {words[1]}"]
    command = importlib.import_module(f"exl3.cli.{exl3.cli.VERBS[words[1]]}").command
    options = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"-h", "--help"}
    return [
        f"exl3 {words[1]} has no option {w}"
        for w in (w.split("=")[0] for w in words[2:])
        if re.match(r"--?[a-zA-Z]", w) and w not in options
    ]


def check_samples() -> list[str]:
    wrong = []
    for source in pages().values():
        for language, code, line in blocks(source.read_text()):
            where = f"{source.name}:{line}"
            if language in ("python", "py"):
                wrong += [f"{where}: {w}" for w in check_python(code)]
            elif language in ("bash", "sh", "shell", "console"):
                for command in code.replace("\\\n", " ").splitlines():
                    wrong += [f"{where}: {w}" for w in check_command(command.removeprefix("$ "))]
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--samples", action="store_true")
    options = parser.parse_args()
    if options.samples:
        if wrong := check_samples():
            raise SystemExit("\n".join(wrong))
        print("code samples: all as they should be")
        return
    if dead := gather():
        raise SystemExit("\n".join(dead))
    python = common.tools("docs")
    target = common.WORK / "site"
    shutil.rmtree(target, ignore_errors=True)
    settings = str(common.ROOT / ".github/sphinx")
    common.run([str(python), "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-c", settings, "-d", str(common.WORK / "doctrees"),
                str(SITE_PAGES), str(target)])  # fmt: skip
    if options.out:
        if not options.keep:
            shutil.rmtree(options.out, ignore_errors=True)
        shutil.copytree(target, options.out, dirs_exist_ok=True)
        print(f"{options.out}: {len(list(options.out.rglob('*.html')))} pages")


if __name__ == "__main__":
    sys.path.insert(0, str(common.ROOT / "src"))
    main()
