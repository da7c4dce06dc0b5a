"""The layers of the package: who may import whom, and what an import of it all does."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import evener

SOURCE = Path(evener.__file__).parent
TESTS = Path(__file__).parent

#: Each level imports from those below it; within a level, from the left. ``evener`` is
#: ``__init__.py``: what a user imports, and so do the command line and the textbook.
LEVELS: dict[int, str] = {
    0: "errors shares grid advice pace trials balance journal timing patience",
    1: (
        "memory lifelines neighbour allocator topology devices arena pickling thread reductions "
        "trees dims batches piece portions replica versions contents strides keeper cells slots "
        "collector update watch state distance leaves"
    ),
    2: (
        "channel printing exchange exchange.host exchange.gather failure messages batchnorm "
        "compiling helper process deputy faults launch member work seat roster recovery meeting "
        "team mirror"
    ),
    3: (
        "outputs gradients run assignment policies call joined coupled together alone "
        "data_parallel grid_call grid_way"
    ),
    5: (
        "parallelize table chart report parallel_functions.places parallel_functions.parts "
        "parallel_functions.replicas parallel_functions.threads parallel_functions dropin "
        "gluon.initializer gluon.split gluon.situation gluon.pending gluon.round gluon.explicit "
        "gluon.network gluon.parameter gluon.trainer gluon still step differences dependence "
        "causes verification experiment verify evener"
    ),
    6: (
        "textbook textbook.resnet textbook.download textbook.fashion_mnist textbook.record "
        "textbook.comparison textbook.main_job textbook.bench textbook.progress "
        "standin program cli"
    ),
}
ORDER = [(level, name) for level, names in LEVELS.items() for name in names.split()]
PLACE = {name: place for place, (_, name) in enumerate(ORDER)}

MAX_LINES = 320


def name_of(path: Path) -> str:
    """How the tables above call a file: ``exchange/host.py`` is ``exchange.host``."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__") or "evener"


FILES = {name_of(path): path for path in sorted(SOURCE.rglob("*.py"))}


def imports_of(name: str) -> Iterator[str]:
    """The modules that a file imports, wherever in the file."""
    package = name if FILES[name].stem == "__init__" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = ".".join(filter(None, [package and f"evener.{package}", node.module]))
            base = module if node.level else str(node.module)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield full if full.removeprefix("evener.") in FILES else base


def ours(module: str) -> str | None:
    """The file of ours that a module is, if it is one."""
    if module.partition(".")[0] != "evener":
        return None
    return module.removeprefix("evener.")


def test_each_file_has_its_place_and_each_place_its_file() -> None:
    assert sorted(FILES) == sorted(PLACE)


@pytest.mark.parametrize("name", FILES)
def test_a_file_imports_only_from_below_and_from_its_left(name: str) -> None:
    wrong = [
        other
        for module in imports_of(name)
        if (other := ours(module)) is not None and not PLACE[other] < PLACE[name]
    ]

    assert wrong == []


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_level_is_imported_by_its_full_name(name: str) -> None:
    tree = ast.parse(FILES[name].read_text())

    relative = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
    assert relative == []


@pytest.mark.parametrize("name", LEVELS[0].split())
def test_the_lowest_level_is_arithmetic_and_imports_no_torch(name: str) -> None:
    modules = {module.partition(".")[0] for module in imports_of(name)}

    assert not modules & {"torch", "numpy", "cloudpickle"}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_not_long(name: str) -> None:
    assert len(FILES[name].read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("name", FILES)
def test_a_file_says_at_its_head_what_it_is(name: str) -> None:
    assert ast.get_docstring(ast.parse(FILES[name].read_text()))


@pytest.mark.parametrize("name", [n for n, path in FILES.items() if path.stem != "__init__"])
def test_a_file_has_its_tests(name: str) -> None:
    test = name.removeprefix("textbook.").replace(".", "_")

    assert (TESTS / f"test_{test}.py").is_file()


def test_a_file_is_called_like_none_of_the_standard_library_and_is_no_drawer() -> None:
    names = {name.rpartition(".")[2] for name in FILES}

    assert not names & sys.stdlib_module_names
    assert not names & {"utils", "common", "helpers", "misc", "tools", "core", "base"}


# ------------------------------------------------------------------ what an import does


PROGRAM = """
import json, os, sys, threading

import cloudpickle
import torch

def descriptors():
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            pass
    return sorted(found)

def state():
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "file descriptors": descriptors(),
        "environment": dict(os.environ),
        "path": list(sys.path),
        "folder": os.getcwd(),
        "files": sorted(os.listdir()),
        "torch threads": torch.get_num_threads(),
        "seed": torch.initial_seed(),
        "random": torch.get_rng_state().tolist(),
        "dtype": str(torch.get_default_dtype()),
        "affinity": sorted(os.sched_getaffinity(0)),
    }

before, modules = state(), set(sys.modules)
import evener
after = state()
names = [
    name
    for name, value in vars(evener).items()
    if not name.startswith("_") and (type(value) is not type(sys) or name in evener.__all__)
]
print(json.dumps({
    "changed": {key: [before[key], after[key]] for key in before if before[key] != after[key]},
    "modules": sorted({name.partition(".")[0] for name in set(sys.modules) - modules}),
    "public": sorted(names),
    "all": sorted(evener.__all__),
    "without a docstring": [name for name in evener.__all__ if not getattr(evener, name).__doc__],
}))
"""


def test_importing_evener_does_nothing_but_define_what_is_public(
    run_python: Callable[..., str],
) -> None:
    told = json.loads(run_python(PROGRAM))

    assert told["changed"] == {}
    assert not {"rich", "typer", "click", "matplotlib", "numpy", "psutil"} & set(told["modules"])
    assert "evener" in told["modules"]
    assert told["all"] == told["public"]
    assert told["without a docstring"] == []
