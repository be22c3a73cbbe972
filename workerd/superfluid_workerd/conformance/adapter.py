"""What every adapter promises before it loads anything, as tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec
import pytest

from superfluid_compat import numbers
from superfluid_compat.errors import DoesNotFit, ModelDamaged, ModelError
from superfluid_workerd.adapter import OpenRequest
from superfluid_workerd.codec.templates import Template
from superfluid_workerd.conformance.case import Case
from superfluid_workerd.options import Option

ENGINES: Final = frozenset({"jax", "llvmlite", "mlx", "numba", "numpy", "torch"})
"""What may be loaded by `check`, `tokenizer` and `open`, and by nothing before them."""


class AdapterContract:
    """Needs a fixture `case` of type `Case`."""

    def test_it_says_what_it_is(self, case: Case) -> None:
        info = case.adapter.info()
        assert info.kit == numbers.KIT
        assert re.fullmatch(r"[a-z][a-z0-9]*", info.id)
        assert info.formats
        assert all(bool(it.magic) != bool(it.holds) for it in info.formats)
        assert info.id not in info.aliases

    def test_its_answers_are_json(self, case: Case) -> None:
        adapter = case.adapter
        for answer in (adapter.info(), adapter.compat(), list(adapter.versions())):
            assert msgspec.json.encode(answer)
        for option in adapter.options():
            assert Option.from_description(option.describe()) == option
        names = [option.name for option in adapter.options()]
        assert len(set(names)) == len(names)

    def test_a_probe_is_an_answer_and_no_exception(self, case: Case) -> None:
        probe = case.adapter.check(case.checked(), case.folder)
        assert probe.version
        assert probe.problem is None, "the case's runtime does not work here"

    def test_the_facts_are_the_loaded_models(self, case: Case) -> None:
        facts = case.adapter.facts(case.model)
        loaded = case.load()
        loaded.runtime.close()
        assert loaded.facts == facts
        assert facts.format in {it.name for it in case.adapter.info().formats}

    def test_the_engine_has_nothing_against_what_it_opens(self, case: Case) -> None:
        case.adapter.check(case.checked(), case.folder)
        case.adapter.shared = case.folder
        case.adapter.vet(case.model, case.checked())

    def test_the_facts_are_what_a_load_finds(self, case: Case) -> None:
        """Of the vocabulary and the context 0 says that the header tells neither."""
        facts = case.adapter.facts(case.model)
        loaded = case.adapter.open(case.request(context=0))
        described = loaded.runtime.describe()
        loaded.runtime.close()
        assert 0 < facts.bytes <= _size(case.model)
        assert facts.vocabulary in (0, described.vocabulary, loaded.tokenizer.size)
        assert facts.context == 0 or described.context <= facts.context
        assert facts.template == (loaded.template is not None)

    def test_the_models_template_compiles(self, case: Case) -> None:
        loaded = case.load()
        loaded.runtime.close()
        assert loaded.template is None or Template(loaded.template)

    def test_importing_it_loads_no_engine(self, case: Case) -> None:
        module = type(case.adapter).__module__
        script = f"import sys, {module}\nprint(*sys.modules)"
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert not ENGINES & set(done.stdout.split())

    @pytest.mark.parametrize("what", ["context", "lanes"])
    def test_more_than_there_is_is_refused_or_given_and_never_cut(
        self, case: Case, what: str
    ) -> None:
        loaded = case.load()
        described = loaded.runtime.describe()
        loaded.runtime.close()
        request = (
            case.request(context=described.context + 1)
            if what == "context"
            else case.request(lanes=described.sequences + 1)
        )
        try:
            loaded = case.adapter.open(request)
        except DoesNotFit:
            return
        got = loaded.runtime.describe()
        loaded.runtime.close()
        assert got.context >= request.context
        assert got.sequences >= request.lanes or not got.generates

    def test_preparing_twice_is_quick_and_changes_nothing(self, case: Case, tmp_path: Path) -> None:
        facts = case.adapter.facts(case.model)
        case.adapter.prepare(facts, case.checked(), tmp_path, lambda done, total: None)
        first = _snapshot(tmp_path)
        case.adapter.prepare(facts, case.checked(), tmp_path, lambda done, total: None)
        assert _snapshot(tmp_path) == first

    @pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
    def test_a_truncated_model_is_damaged(self, case: Case, tmp_path: Path, share: float) -> None:
        if case.model.is_dir():
            return
        cut = tmp_path / case.model.name
        data = case.model.read_bytes()
        cut.write_bytes(data[: int(len(data) * share)])
        request = OpenRequest(
            model=cut, scratch=tmp_path, shared=case.folder, options=case.checked()
        )
        with pytest.raises(ModelDamaged):
            case.adapter.open(request)

    def test_a_missing_model_is_an_error_of_the_tree(self, case: Case, tmp_path: Path) -> None:
        with pytest.raises(ModelError):
            case.adapter.facts(tmp_path / "none")

    def test_loading_leaves_the_shared_folder_as_it_was(self, case: Case) -> None:
        case.load().runtime.close()
        before = _snapshot(case.folder)
        case.load().runtime.close()
        assert _snapshot(case.folder) == before


def _snapshot(folder: Path) -> dict[str, int]:
    return {
        os.path.relpath(path, folder): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _size(model: Path) -> int:
    files = model.rglob("*") if model.is_dir() else [model]
    return sum(path.stat().st_size for path in files if path.is_file())
