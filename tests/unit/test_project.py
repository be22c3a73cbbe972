"""What holds for the project as a whole: who loads what, public names, documents, packaging."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from superfluid_compat import errors

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = [
    ROOT / "compat/superfluid_compat",
    ROOT / "workerd/superfluid_workerd",
    ROOT / "superfluid/superfluid",
    ROOT / "adapters/native/superfluid_adapter_native",
]
ENGINES = {"numpy", "numba", "llvmlite", "jinja2", "tokenizers", "superfluid_adapter_native"}


def loaded_by(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after `code`."""
    script = f"{code}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def modules_of(package: Path) -> list[str]:
    return sorted(
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in package.rglob("*.py")
        if path.name != "__main__.py"
    )


def test_the_daemon_loads_no_engine() -> None:
    names = modules_of(ROOT / "superfluid/superfluid")
    assert "superfluid.daemon" in names
    assert not loaded_by("import " + ", ".join(names)) & ENGINES


def test_help_loads_neither_server_nor_hub() -> None:
    loaded = loaded_by("from superfluid.cli import run\nassert run(['--help']) == 0")
    assert not loaded & {"uvicorn", "starlette", "huggingface_hub", "pydantic", "httpx", "rich"}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_packages_are_typed_and_say_what_they_are(package: Path) -> None:
    assert (package / "py.typed").is_file()
    for path in package.rglob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text("utf-8"))), f"{path} has no docstring"


@pytest.mark.parametrize(
    "name", [name for package in PACKAGES for name in modules_of(package) if "__main__" not in name]
)
def test_what_a_module_exports_exists(name: str) -> None:
    module = importlib.import_module(name)
    for public in getattr(module, "__all__", ()):
        assert hasattr(module, public), f"{name}.{public}"


def leaves(root: type[errors.SuperfluidError]) -> list[type[errors.SuperfluidError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in leaves(child))]


def test_every_error_has_a_code_of_its_own_and_a_row_in_the_docs() -> None:
    page = (ROOT / "docs/exit-codes.md").read_text("utf-8")
    classes = leaves(errors.SuperfluidError)
    assert len({cls.code for cls in classes}) == len(classes)
    for cls in classes:
        assert isinstance(cls.exit_code, errors.ExitCode)
        assert 400 <= cls.http_status <= 599
        assert f"`{cls.code}` | {int(cls.exit_code)} | {cls.http_status} |" in page


def test_the_tree_drawn_is_the_tree() -> None:
    drawn = set(re.findall(r"\b[A-Z]\w+[a-z]\w*", (errors.__doc__ or "").partition("\n\n    ")[2]))
    for cls in leaves(errors.SuperfluidError):
        assert cls.__name__ in drawn


def test_generated_pages_are_up_to_date() -> None:
    subprocess.run([sys.executable, "docs/generate.py", "--check"], cwd=ROOT, check=True)


def test_every_dependency_has_its_reason() -> None:
    page = (ROOT / "docs/dependencies.md").read_text("utf-8")
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    listed = re.search(r"^dependencies = \[(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    assert listed is not None
    for name in re.findall(r'"([A-Za-z0-9_-]+)', listed[1]):
        assert f"`{name}`" in page, f"{name} has no line in docs/dependencies.md"


def test_links_between_documents_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_fragments_of_the_changelog_are_of_a_known_kind() -> None:
    for path in (ROOT / "docs/changes").glob("*.md"):
        assert re.fullmatch(r"(added|changed|fixed|contract)-[a-z0-9-]+\.md", path.name), path.name
        assert path.read_text("utf-8").strip()
