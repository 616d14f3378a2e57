"""What holds for every test.

None reaches a package index but one of its own. Where there is neither a compiler nor compiled kernels, tests that import the
kernels are skipped; others run.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import certifi
import httpx
import pytest
from _pytest.mark import ParameterSet
from hypothesis import HealthCheck, settings

from cloister.backends.availability import why_no_kernels
from cloister.cli.doctor import COMPILERS
from tests import limited_kernels
from tests.processor_time import ProcessorTime
from tests.thinning import all_examples, examples

os.environ["PIP_NO_INDEX"] = "1"
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton, whichever folder a process collects first
# how long a reply takes depends on who else uses the machine: five seconds, which httpx waits by itself, may be too few
_DEFAULT_TIMEOUT: httpx.Timeout = httpx.get.__kwdefaults__["timeout"]
_DEFAULT_TIMEOUT.connect = _DEFAULT_TIMEOUT.read = _DEFAULT_TIMEOUT.write = _DEFAULT_TIMEOUT.pool = 300.0
# and so does the time of an example, and that of drawing it
settings.register_profile(
    "cloister",
    deadline=None,
    max_examples=examples(100),
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=not all_examples(),
)
settings.load_profile("cloister")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernels", metavar="NAME", help="native kernels as on a processor that has no better ones, such as avx2")
    parser.addoption("--processor-time", action="store_true", help="print the processor time that the tests of each file take")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--processor-time"):
        config.pluginmanager.register(ProcessorTime())
    if hasattr(config, "workerinput"):  # a worker of xdist is a child, and has what is made here
        if config.args == config.getini("testpaths"):
            config.args = _turned(config.args, config.workerinput["workerid"], config.workerinput["workercount"])
        return
    _trust_one_certificate(config)
    name = config.getoption("--kernels")
    if name is None:
        return
    folder = tempfile.TemporaryDirectory(prefix="kernels-")
    config.add_cleanup(folder.cleanup)
    limited_kernels.limit_children(name, Path(folder.name))
    try:
        limited_kernels.limit(name)
    except ImportError as error:
        raise pytest.UsageError(str(error)) from None


def _turned(folders: list[str], worker: str, num_workers: int) -> list[str]:
    """What is in the folders, from another place on for each worker: what one has compiled, the others load."""
    found = sorted(str(path) for folder in folders for path in Path(folder).iterdir() if _has_tests(path))
    first = len(found) * int(worker.removeprefix("gw")) // num_workers
    return found[first:] + found[:first]


def _has_tests(path: Path) -> bool:
    return path.match("test_*.py") or (path.is_dir() and any(path.rglob("test_*.py")))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All workers run the tests in one order, that of the files' names."""
    items.sort(key=lambda item: item.path.parts)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Where no slow test runs, slow cases are not built: they are almost half of all."""
    if metafunc.config.option.markexpr == "not slow":
        is_slow = metafunc.definition.get_closest_marker("slow") is not None
        metafunc.parametrize = partial(_parametrize_quick, metafunc.parametrize, is_slow)  # type: ignore[method-assign]


def _parametrize_quick(
    parametrize: Callable[..., None],
    is_slow: bool,
    names: str | Sequence[str],
    values: Iterable[object],
    indirect: bool | Sequence[str] = False,
    ids: Iterable[object] | Callable[[object], object] | None = None,
    **rest: object,
) -> None:
    """`Metafunc.parametrize` without slow cases; one stays for pytest to deselect where all are."""
    cases = list(values)
    quick = [place for place, case in enumerate(cases) if not (is_slow or _is_slow(case))] or [*range(len(cases))][:1]
    if ids is not None and not callable(ids):
        listed = list(islice(ids, len(cases)))
        ids = [listed[place] for place in quick]
    parametrize(names, [cases[place] for place in quick], indirect=indirect, ids=ids, **rest)


def _is_slow(case: object) -> bool:
    return isinstance(case, ParameterSet) and any(mark.name == "slow" for mark in case.marks)


def _trust_one_certificate(config: pytest.Config) -> None:
    """Every HTTP client reads all certificates that it trusts: 30 ms of processor time for some 150, a thousand times."""
    folder = tempfile.TemporaryDirectory(prefix="trusted-")
    config.add_cleanup(folder.cleanup)
    first, end, _ = Path(certifi.where()).read_text(encoding="utf-8").partition("-----END CERTIFICATE-----")
    trusted = Path(folder.name, "trusted.pem")
    trusted.write_text(f"{first}{end}\n", encoding="utf-8")
    os.environ["SSL_CERT_FILE"] = str(trusted)


class ModuleWithoutKernels(pytest.Module):
    """A module of tests that is skipped if it cannot be imported because there are no kernels."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except self.CollectError as error:
            if not isinstance(error.__cause__, ImportError) or "_native" not in str(error.__cause__):
                raise
        pytest.skip("there is no C++ compiler here", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if why_no_kernels() is None or any(shutil.which(name) for name in COMPILERS):
        return None  # pytest's own; kernels that a compiler should have made are not passed over
    module: pytest.Module = ModuleWithoutKernels.from_parent(parent, path=module_path)
    return module


def pytest_sessionstart() -> None:
    gc.disable()  # imports and collection make a million objects and little garbage


def pytest_collection_finish() -> None:
    """Exempts libraries and collected tests from every later garbage collection: engines collect often."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """The same for what the tests of a directory have imported."""
    yield
    if nextitem is not None and nextitem.path.parent != item.path.parent:
        gc.collect()
        gc.freeze()


def pytest_sessionfinish() -> None:
    """Libraries find at the end what they made; before, pytest would look through a million objects twice for nothing."""
    gc.disable()
    atexit.register(gc.unfreeze)
