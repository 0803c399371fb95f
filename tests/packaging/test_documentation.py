"""Links and code samples of the documentation; the checker itself."""

from __future__ import annotations

import pytest


@pytest.fixture
def docs(script):
    return script("docs")


def test_code_samples(docs):
    assert docs.check_samples() == []


def test_links_to_files_exist(docs, tmp_path, monkeypatch):
    monkeypatch.setattr(docs, "SITE_PAGES", tmp_path / "pages")
    assert docs.gather() == []
    assert (tmp_path / "pages/index.md").exists()


def test_all_pages_are_on_the_site(docs):
    listed = [f"{name}.md" for names in docs.NAVIGATION.values() for name in names]
    assert [name for name in docs.pages() if name not in listed] == ["index.md"]


def test_faults_are_found(docs):
    assert docs.check_python("import exl3\nexl3.lod('x')") == ["exl3.lod does not exist"]
    assert docs.check_python("from exl3 import Cache, Kache") == ["exl3 has no Kache"]
    assert docs.check_python("x = (") != []
    assert docs.check_command("exl3 convert -i A -o B -b 4 --bitz 3") == ["exl3 convert has no option --bitz"]
    assert docs.check_command("CUDA_VISIBLE_DEVICES=0 exl3 transmogrify") == ["no verb exl3 transmogrify"]
    assert docs.check_command("make whee BACKEND=cpu") == ["make has no target whee"]
    assert docs.check_command("exl3 convert -i A -o B -b 4 --cal_data x  # comment --nope") == []
