"""Topology: machines of all kinds, as folders of small files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.topology import (
    MAX_GROUPS,
    Core,
    _parse_ranges,
    cpu_name,
    cpu_quota,
    group_cores,
    memory_limit_bytes,
    read_cores,
    usable_cores,
)

INF = float("inf")


# ------------------------------------------------------------------ machines made of files


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def machine(
    root: Path,
    *,
    siblings: Sequence[str],
    caches: Sequence[str] = (),
    nodes: Sequence[str] = (),
) -> None:
    """Write what Linux tells of a machine: the CPUs of each core, each cache and each node."""
    base = root / "sys/devices/system"
    for text in siblings:
        for cpu in _parse_ranges(text):
            folder = base / f"cpu/cpu{cpu}"
            write(folder / "topology/thread_siblings_list", text)
            for index, level in enumerate((1, 1, 2)):  # data and instructions, then both
                write(folder / f"cache/index{index}/level", level)
                write(folder / f"cache/index{index}/shared_cpu_list", text)
    for text in caches:
        for cpu in _parse_ranges(text):
            write(base / f"cpu/cpu{cpu}/cache/index3/level", 3)
            write(base / f"cpu/cpu{cpu}/cache/index3/shared_cpu_list", text)
    for number, text in enumerate(nodes):
        write(base / f"node/node{number}/cpulist", text)


def cpus(cores: Iterable[Core]) -> list[int]:
    return [core.cpu for core in cores]


def test_two_hardware_threads_are_one_core(tmp_path: Path) -> None:
    machine(tmp_path, siblings=["0,4", "1,5", "2,6", "3,7"])

    assert cpus(read_cores(tmp_path, range(8))) == [0, 1, 2, 3]


def test_a_core_of_which_only_the_second_thread_is_allowed_counts(tmp_path: Path) -> None:
    machine(tmp_path, siblings=["0-1", "2-3"])

    assert cpus(read_cores(tmp_path, [1, 2, 3])) == [1, 2]


def test_cores_come_in_the_order_of_the_machine_not_of_their_numbers(tmp_path: Path) -> None:
    # Linux often numbers the CPUs of two sockets alternately.
    machine(
        tmp_path,
        siblings=["0", "1", "2", "3"],
        caches=["0,2", "1,3"],
        nodes=["0,2", "1,3"],
    )

    assert read_cores(tmp_path, range(4)) == [
        Core(node=0, cache=0, cpu=0),
        Core(node=0, cache=0, cpu=2),
        Core(node=1, cache=1, cpu=1),
        Core(node=1, cache=1, cpu=3),
    ]


def test_only_a_cache_that_cores_share_groups_them(tmp_path: Path) -> None:
    machine(tmp_path, siblings=["0,2", "1,3"])

    assert {core.cache for core in read_cores(tmp_path, range(4))} == {0}


def test_the_last_of_several_shared_caches_counts(tmp_path: Path) -> None:
    machine(tmp_path, siblings=["0", "1", "2", "3"], caches=["0-1", "2-3"])
    for cpu in range(4):
        write(tmp_path / f"sys/devices/system/cpu/cpu{cpu}/cache/index4/level", 4)
        write(tmp_path / f"sys/devices/system/cpu/cpu{cpu}/cache/index4/shared_cpu_list", "0-3")

    assert {core.cache for core in read_cores(tmp_path, range(4))} == {0}


@pytest.mark.parametrize("allowed", [[0], [5, 3], range(64)])
def test_where_the_system_tells_nothing_each_cpu_is_a_core(
    tmp_path: Path, allowed: Iterable[int]
) -> None:
    cores = read_cores(tmp_path, allowed)

    assert cores == [Core(node=0, cache=0, cpu=cpu) for cpu in sorted(allowed)]


def test_a_cache_without_its_list_of_cpus_groups_nothing(tmp_path: Path) -> None:
    machine(tmp_path, siblings=["0", "1"])
    write(tmp_path / "sys/devices/system/cpu/cpu1/cache/index3/level", 3)

    assert {core.cache for core in read_cores(tmp_path, range(2))} == {0}


@pytest.mark.parametrize(
    ("quota", "num_cores"),
    [(INF, 4), (4.0, 4), (8.0, 4), (3.99, 3), (2.5, 2), (1.0, 1), (0.5, 1), (0.0, 1)],
)
def test_a_quota_pays_for_whole_cores_and_for_one_at_least(quota: float, num_cores: int) -> None:
    cores = [Core(0, 0, cpu) for cpu in range(4)]

    assert usable_cores(cores, quota) == cores[:num_cores]


# ------------------------------------------------------------------ groups


def cores_of(*groups: tuple[int, int, range]) -> list[Core]:
    return [Core(node, cache, cpu) for node, cache, numbers in groups for cpu in numbers]


def test_up_to_eight_cores_are_a_device_each() -> None:
    cores = cores_of((0, 0, range(4)), (0, 4, range(4, 8)))

    assert group_cores(cores) == [(cpu,) for cpu in range(8)]
    assert len(group_cores(cores)) == MAX_GROUPS


def test_more_cores_are_grouped_by_shared_cache() -> None:
    # One socket of four chiplets.
    cores = cores_of(*((0, first, range(first, first + 4)) for first in range(0, 16, 4)))

    assert group_cores(cores) == [tuple(range(first, first + 4)) for first in range(0, 16, 4)]


def test_where_there_are_too_many_caches_the_nodes_count() -> None:
    # Two sockets of sixteen chiplets of two cores each.
    cores = cores_of(*((first // 32, first, range(first, first + 2)) for first in range(0, 64, 2)))

    assert group_cores(cores) == [tuple(range(32)), tuple(range(32, 64))]


def test_where_caches_are_unequal_the_nodes_count() -> None:
    cores = cores_of((0, 0, range(6)), (0, 6, range(6, 8)), (1, 8, range(8, 16)))

    assert group_cores(cores) == [tuple(range(8)), tuple(range(8, 16))]


def test_a_machine_without_structure_is_cut_into_eight() -> None:
    assert group_cores(cores_of((0, 0, range(32)))) == [
        tuple(range(first, first + 4)) for first in range(0, 32, 4)
    ]


def test_two_nodes_that_number_their_caches_alike_are_two() -> None:
    # Without caches told, each core's cache is 0.
    cores = cores_of((0, 0, range(8)), (1, 0, range(8, 16)))

    assert group_cores(cores) == [tuple(range(8)), tuple(range(8, 16))]


@pytest.mark.parametrize(
    ("num_cores", "num_groups", "groups"),
    [
        (4, 1, [(0, 1, 2, 3)]),
        (4, 2, [(0, 1), (2, 3)]),
        (5, 2, [(0, 1), (2, 3)]),
        (4, 4, [(0,), (1,), (2,), (3,)]),
        (4, 3, [(0,), (1,), (2,)]),
        (2, 5, [(0,), (1,), (0,), (1,), (0,)]),
        (1, 2, [(0,), (0,)]),
    ],
)
def test_equal_groups_on_demand(
    num_cores: int, num_groups: int, groups: list[tuple[int, ...]]
) -> None:
    assert group_cores(cores_of((0, 0, range(num_cores))), num_groups) == groups


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3)).map(lambda pair: (pair[0], sum(pair))),
        min_size=1,
        max_size=80,
    ),
    st.one_of(st.none(), st.integers(1, 20)),
)
def test_groups_are_equal_and_of_cores_that_there_are(
    places: list[tuple[int, int]], num_groups: int | None
) -> None:
    cores = sorted(Core(node, cache, cpu) for cpu, (node, cache) in enumerate(places))

    groups = group_cores(cores, num_groups)

    assert len({len(group) for group in groups}) == 1
    used = [cpu for group in groups for cpu in group]
    assert set(used) <= set(cpus(cores))
    if num_groups is None:
        assert len(groups) <= MAX_GROUPS
        assert len(groups) > 1 or len(cores) == 1
    else:
        assert len(groups) == num_groups
    if len(groups) <= len(cores):
        assert len(used) == len(set(used))


# ------------------------------------------------------------------ limits of control groups


def cgroup(root: Path, *lines: str) -> Path:
    write(root / "proc/self/cgroup", "\n".join(lines))
    return root / "sys/fs/cgroup"


def test_without_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) == INF


@pytest.mark.parametrize(
    ("text", "quota"),
    [
        ("max 100000", INF),
        ("150000 100000", 1.5),
        ("50000 100000", 0.5),
        ("200000 50000", 4.0),
        ("nonsense", INF),
        ("", INF),
    ],
)
def test_a_quota_of_version_2(tmp_path: Path, text: str, quota: float) -> None:
    folder = cgroup(tmp_path, "0::/user.slice/job")
    write(folder / "user.slice/job/cpu.max", text)

    assert cpu_quota(tmp_path) == quota


def test_the_lowest_quota_on_the_way_up_counts(tmp_path: Path) -> None:
    folder = cgroup(tmp_path, "0::/outer/inner")
    write(folder / "outer/inner/cpu.max", "800000 100000")
    write(folder / "outer/cpu.max", "300000 100000")
    write(folder / "cpu.max", "max 100000")

    assert cpu_quota(tmp_path) == 3.0


@pytest.mark.parametrize("name", ["cpu,cpuacct", "cpu", "cpuacct,cpu"])
@pytest.mark.parametrize(("microseconds", "quota"), [(250000, 2.5), (-1, INF)])
def test_a_quota_of_version_1(tmp_path: Path, name: str, microseconds: int, quota: float) -> None:
    folder = cgroup(tmp_path, "12:memory:/docker/a", f"4:{name}:/docker/a", "1:name=systemd:/x")
    write(folder / name / "docker/a/cpu.cfs_quota_us", microseconds)
    write(folder / name / "docker/a/cpu.cfs_period_us", 100000)

    assert cpu_quota(tmp_path) == quota


def test_version_1_is_found_where_only_one_of_the_joined_names_is_mounted(tmp_path: Path) -> None:
    folder = cgroup(tmp_path, "4:cpu,cpuacct:/")
    write(folder / "cpu/cpu.cfs_quota_us", 100000)
    write(folder / "cpu/cpu.cfs_period_us", 100000)

    assert cpu_quota(tmp_path) == 1.0


def test_a_quota_of_another_controller_is_none_of_ours(tmp_path: Path) -> None:
    folder = cgroup(tmp_path, "5:cpuset:/a", "4:cpuacct:/a")
    for name in ("cpuset", "cpuacct"):
        write(folder / name / "a/cpu.cfs_quota_us", 100000)
        write(folder / name / "a/cpu.cfs_period_us", 100000)

    assert cpu_quota(tmp_path) == INF


def test_in_a_container_the_path_of_the_host_is_missing(tmp_path: Path) -> None:
    # Version 1, without a namespace of its own: the container sees its group as the root.
    folder = cgroup(tmp_path, "4:cpu,cpuacct:/docker/0123abcd", "7:memory:/docker/0123abcd")
    write(folder / "cpu,cpuacct/cpu.cfs_quota_us", 200000)
    write(folder / "cpu,cpuacct/cpu.cfs_period_us", 100000)
    write(folder / "memory/memory.limit_in_bytes", 1 << 30)

    assert cpu_quota(tmp_path) == 2.0
    assert memory_limit_bytes(tmp_path) == 1 << 30


def test_a_path_that_leads_out_of_the_namespace_ends(tmp_path: Path) -> None:
    folder = cgroup(tmp_path, "0::/../../other")
    write(folder / "cpu.max", "100000 100000")

    assert cpu_quota(tmp_path) == 1.0


def test_a_path_with_colons_is_one_path(tmp_path: Path) -> None:
    folder = cgroup(tmp_path, "0::/a:b/c")
    write(folder / "a:b/c/cpu.max", "100000 50000")

    assert cpu_quota(tmp_path) == 2.0


MEMINFO = "MemTotal:       16384 kB\nMemFree:         1024 kB\nMemAvailable:    2048 kB"


def test_memory_is_that_of_the_machine_where_nothing_limits_it(tmp_path: Path) -> None:
    write(tmp_path / "proc/meminfo", MEMINFO)

    assert memory_limit_bytes(tmp_path) == 16384 * 1024


@pytest.mark.parametrize(
    ("limit", "num_bytes"),
    [("max", 16384 * 1024), (4096, 4096), (1 << 40, 16384 * 1024)],
)
def test_memory_limit_of_version_2(tmp_path: Path, limit: object, num_bytes: int) -> None:
    write(tmp_path / "proc/meminfo", MEMINFO)
    folder = cgroup(tmp_path, "0::/a/b")
    write(folder / "a/memory.max", limit)
    write(folder / "a/b/memory.max", "max")

    assert memory_limit_bytes(tmp_path) == num_bytes


@pytest.mark.parametrize(
    ("limit", "num_bytes"), [(9223372036854771712, 16384 * 1024), (65536, 65536)]
)
def test_memory_limit_of_version_1(tmp_path: Path, limit: int, num_bytes: int) -> None:
    write(tmp_path / "proc/meminfo", MEMINFO)
    folder = cgroup(tmp_path, "3:memory:/a")
    write(folder / "memory/a/memory.limit_in_bytes", limit)

    assert memory_limit_bytes(tmp_path) == num_bytes


def test_memory_of_a_machine_that_tells_nothing_is_unknown(tmp_path: Path) -> None:
    assert memory_limit_bytes(tmp_path) == 0


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        (
            "processor\t: 0\nmodel name\t: AMD EPYC 7763  64-Core\nflags\t: fpu",
            "AMD EPYC 7763 64-Core",
        ),
        ("processor\t: 0\nCPU implementer\t: 0x41", "CPU"),
        ("", "CPU"),
    ],
)
def test_the_name_of_the_cpu(tmp_path: Path, cpuinfo: str, name: str) -> None:
    write(tmp_path / "proc/cpuinfo", cpuinfo)

    assert cpu_name(tmp_path) == name


def test_what_cannot_be_read_tells_nothing(tmp_path: Path) -> None:
    (tmp_path / "proc/cpuinfo").mkdir(parents=True)

    assert cpu_name(tmp_path) == "CPU"
