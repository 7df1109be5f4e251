"""Hardware profiles: what the installed ones hold, what a file may say, and what is said about a wrong one."""

from __future__ import annotations

import math
import time
from dataclasses import fields, is_dataclass, replace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware_profiles import (
    AttentionFigures,
    GemmFigures,
    GemmTile,
    HardwareProfile,
    HostFigures,
    LinkFigures,
    MeasuredAttention,
    MeasuredCollective,
    MeasuredGemm,
    MemoryFigures,
    NetworkFigures,
    ProfileError,
    ScanFigures,
    list_profiles,
    load_profile,
    profile_from_mapping,
    profile_to_yaml,
)
from hardware_profiles.checking import CHOICES, DTYPES
from hardware_profiles.loader import profile_to_mapping
from op_graphs.vocabulary import Communication, DType

MACHINES = [name for name in list_profiles() if name != "toy"]


def toy() -> dict[str, object]:
    return profile_to_mapping(load_profile("toy"))


def changed(path: str, value: object) -> dict[str, object]:
    """The toy machine with one value set; ``None`` removes it."""
    document = toy()
    *above, last = path.split(".")
    inner = document
    for key in above:
        inner = inner[key]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return document


# ------------------------------------------------------------------------------------------- installed profiles


def test_the_installed_profiles():
    assert list_profiles() == [
        "a100-pcie-80g",
        "a100-sxm-80g",
        "b200-sxm",
        "b300-sxm",
        "gb200-nvl72",
        "gb300-nvl72",
        "h100-sxm",
        "h200-sxm",
        "h800-sxm",
        "mi300x",
        "toy",
    ]


@pytest.mark.parametrize("name", list_profiles())
def test_an_installed_profile_is_named_as_its_file_and_survives_writing(name, tmp_path):
    profile = load_profile(name)
    assert profile.name == name
    copy = tmp_path / "copy.yaml"
    copy.write_text(profile_to_yaml(profile), encoding="utf-8")
    assert load_profile(copy) == profile
    assert load_profile(str(copy)) == profile


@pytest.mark.parametrize("name", MACHINES)
def test_each_figure_of_a_machine_has_its_own_source(name):
    def leaves(record, path=""):
        for field in fields(record):
            value, here = getattr(record, field.name), f"{path}{field.name}"
            if is_dataclass(value):
                yield from leaves(value, f"{here}.")
            elif here == "peak_tflops":
                yield from (f"{here}.{dtype}" for dtype in value)
            elif here == "gemm.tiles" or (isinstance(value, (int, float)) and value != field.default):
                yield here

    profile = load_profile(name)
    assert set(leaves(profile)) <= set(profile.sources)


PUBLISHED = [
    # name, bf16 dense TFLOPS, GB of memory on the datasheet, memory GB/s, NVLink or xGMI or PCIe GB/s each way, domain
    ("a100-sxm-80g", 312, 80, 2039, 300, 8),
    ("a100-pcie-80g", 312, 80, 1935, 31.5, 8),
    ("h100-sxm", 989.4, 80, 3350, 450, 8),
    ("h200-sxm", 989.4, 141, 4800, 450, 8),
    ("h800-sxm", 989.4, 80, 3350, 200, 8),
    ("b200-sxm", 2250, 180, 8000, 900, 8),
    ("b300-sxm", 2250, 288, 8000, 900, 8),
    ("gb200-nvl72", 2500, 186, 8000, 900, 72),
    ("gb300-nvl72", 2500, 288, 8000, 900, 72),
    ("mi300x", 1307.4, 192, 5300, 448, 8),
]


@pytest.mark.parametrize(
    ("name", "tflops", "gigabytes", "memory", "link", "domain"), PUBLISHED, ids=[row[0] for row in PUBLISHED]
)
def test_datasheet_figures_are_dense_peaks_and_one_direction(name, tflops, gigabytes, memory, link, domain):
    profile = load_profile(name)
    assert profile.peak_tflops["bf16"] == tflops
    assert profile.peak_tflops.get("fp8", 2 * tflops) == pytest.approx(2 * tflops, rel=1e-3)
    assert profile.memory.bandwidth_gb_per_s == memory
    assert profile.network.domain.bandwidth_gb_per_s == link
    assert profile.network.gpus_per_domain == domain
    # The driver keeps some for itself, and a GB of the datasheet is something between 10^9 bytes and 2^30.
    assert gigabytes * 0.92 < profile.memory.capacity_gib <= gigabytes


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_reaches_less_than_its_datasheet(name):
    profile = load_profile(name)
    shares = (
        profile.gemm.mainloop_efficiency,
        profile.gemm.sustained_efficiency,
        profile.attention.forward_efficiency,
        profile.memory.stream_efficiency,
        profile.network.domain.efficiency,
        profile.network.fabric.efficiency,
    )
    assert max(shares) < 1
    assert profile.gemm.sustained_efficiency <= profile.gemm.mainloop_efficiency


def test_the_toy_machine_loses_nothing():
    profile = load_profile("toy")
    assert profile.peak_tflops["bf16"] == 1.0
    assert profile.memory.bandwidth_gb_per_s == 1000.0
    assert profile.network.domain == LinkFigures(bandwidth_gb_per_s=100.0, efficiency=1.0, latency_us=0.0)
    assert profile.host.launch_us == profile.memory.kernel_floor_us == profile.network.collective_base_us == 0


def test_loading_is_quick():
    load_profile("h100-sxm")
    begin = time.perf_counter()
    for _ in range(5):
        load_profile("h100-sxm")
    assert (time.perf_counter() - begin) / 5 < 0.1


def test_names_are_those_of_the_operation_graph():
    assert set(DTYPES) <= {dtype.name.lower() for dtype in DType}
    communications = {communication.name.lower() for communication in Communication}
    assert set(CHOICES["communication"]) - {"p2p"} <= communications


# ------------------------------------------------------------------------------------------- names and files


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("h100-sxn", "Nearest: h100-sxm"),
        ("H100_SXM", "Nearest: h100-sxm"),
        ("zzz", "Installed: a100-pcie-80g, a100-sxm-80g"),
        ("", "no hardware profile ''"),
        ("h100\0", "no hardware profile"),
        ("missing.yaml", "missing.yaml: no such file"),
        ("no/such/file", "no such file"),
        ("x" * 5000, "no hardware profile"),
    ],
)
def test_an_unknown_name(name, expected):
    with pytest.raises(ProfileError) as error:
        load_profile(name)
    assert expected in str(error.value)


CONTENTS = [
    ("not text", b"\xff\xfe\x00\x01", "is not UTF-8 text"),
    ("binary", b"name: a\0b", "holds binary data"),
    ("not YAML", b"name: [1, 2", "is not valid YAML"),
    ("a tag", b"name: !!python/object:os.system x", "is not valid YAML"),
    ("a key twice", b"name: toy\nname: toy2\n", "key 'name' is given twice (line 2, column 1)"),
    ("empty", b"", "the file: a mapping of HardwareProfile fields was expected, not None"),
    ("a list", b"- 1\n", "a mapping of HardwareProfile fields was expected"),
    ("an alias", b"a: &x [1]\nb: *x\n", "line 1 uses a YAML anchor or alias"),
    ("deep", b"[" * 500, "is nested deeper than the 8 levels"),
    ("deeper", b"- " * 5000, "is nested deeper than the 8 levels"),
    ("two documents", b"name: a\n---\nname: b\n", "is not valid YAML"),
    ("a huge integer", b"sm_count: " + b"9" * 5000, ""),
    ("an impossible date", b"name: 2020-13-45\n", "is not valid YAML"),
    ("a SimuMax file", b'{"accelerator": {}, "networks": {}}', "convert it with import_simumax first"),
]


@pytest.mark.parametrize(
    ("content", "expected"), [row[1:] for row in CONTENTS], ids=[row[0] for row in CONTENTS]
)
def test_a_file_that_is_no_profile(content, expected, tmp_path):
    path = tmp_path / "machine.yaml"
    path.write_bytes(content)
    with pytest.raises(ProfileError) as error:
        load_profile(path)
    assert expected in str(error.value)
    assert str(path) in str(error.value)


def test_an_expanding_file_is_refused_before_it_expands(tmp_path):
    lines = ["a0: &a0 [lol, lol]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 40)]
    path = tmp_path / "bomb.yaml"
    path.write_text("\n".join(lines))
    begin = time.perf_counter()
    with pytest.raises(ProfileError, match="anchor or alias"):
        load_profile(path)
    assert time.perf_counter() - begin < 1


def test_a_file_over_the_size_limit_and_a_folder_are_refused(tmp_path):
    path = tmp_path / "large.yaml"
    with path.open("wb") as file:
        file.truncate(16 * 2**20 + 1)
    with pytest.raises(ProfileError, match="larger than the limit of 16 MiB"):
        load_profile(path)
    with pytest.raises(ProfileError, match="is not a file"):
        load_profile(tmp_path)


# ------------------------------------------------------------------------------------------- keys, types, ranges

WRONG = [
    ("gemm.tile", 1, "gemm.tile: unknown key (value 1); did you mean 'tiles'?"),
    ("peak_tflop", {}, "peak_tflop: unknown key (value {}); did you mean 'peak_tflops'?"),
    ("memory.colour", "red", "valid keys: capacity_gib, bandwidth_gb_per_s"),
    ("memory.capacity_gib", None, "memory.capacity_gib is missing"),
    ("memory", 3, "memory: a mapping of MemoryFigures fields was expected, not 3"),
    ("memory.capacity_gib", -1, "memory.capacity_gib: -1 is out of range; it must be more than 0"),
    ("memory.capacity_gib", "80", "memory.capacity_gib: '80' is text to YAML"),
    ("memory.capacity_gib", "1e3", "'1e3' is text to YAML; write it with a point and a sign (1.0e+3)"),
    ("memory.capacity_gib", math.nan, "nan is not a finite number"),
    ("memory.capacity_gib", math.inf, "inf is not a finite number"),
    ("memory.capacity_gib", 10**400, "is not a finite number"),
    ("memory.capacity_gib", True, "a number was expected, not True"),
    ("memory.stream_efficiency", 88, "88 is out of range; it must be more than 0 and at most 1.5"),
    ("memory.stream_efficiency", 0, "0 is out of range"),
    ("memory.kernel_gap_us", -0.5, "it must be 0 or more"),
    ("sm_count", 108.5, "sm_count: a whole number was expected, not 108.5"),
    ("sm_count", 0, "it must be more than 0"),
    ("network.multicast", "yes", "network.multicast: true or false was expected, not 'yes'"),
    ("network.collective_sms", 2, "network.collective_sms: 2 SMs of a collective do not fit in sm_count: 1"),
    ("vendor", 5, "vendor: text was expected, not 5"),
    ("name", " ", "name is empty"),
    ("peak_tflops", {}, "peak_tflops: at least one entry is needed"),
    ("peak_tflops.bf61", 1.0, "peak_tflops.bf61: unknown dtype (value 1.0); did you mean 'bf16'?"),
    ("gemm.tiles", [], "gemm.tiles: at least one row is needed"),
    ("gemm.tiles", [{"m": 128}], "gemm.tiles[0].n is missing"),
    ("gemm.tiles", "128x256", "gemm.tiles: a list was expected, not '128x256'"),
    ("sources.memory", None, "sources: nothing says where memory.capacity_gib, memory.bandwidth_gb_per_s"),
    ("sources.memory", "", "sources.memory is empty"),
    ("sources.memroy", "x", "sources.memroy: there is no such figure in this file; did you mean 'memory'?"),
    ("sources", None, "sources is missing"),
]


@pytest.mark.parametrize(
    ("path", "value", "expected"), WRONG, ids=[f"{row[0]}={row[1]!r:.20}" for row in WRONG]
)
def test_a_wrong_value_is_named_with_its_limit(path, value, expected):
    with pytest.raises(ProfileError) as error:
        profile_from_mapping(changed(path, value), "machine.yaml")
    assert expected in str(error.value)
    assert str(error.value).startswith("machine.yaml: ")


def test_all_errors_are_shown_at_once():
    document = changed("gemm.tile", 1)
    document["memory"]["stream_efficiency"] = 88
    document["network"]["domain"]["latency"] = 2
    del document["host"]
    with pytest.raises(ProfileError) as error:
        profile_from_mapping(document, "machine.yaml")
    lines = str(error.value).splitlines()
    assert lines[0].startswith("machine.yaml: 5 errors in the hardware profile")
    assert {line.split(":")[0].strip(" -") for line in lines[1:]} == {
        "gemm.tile",
        "memory.stream_efficiency",
        "network.domain.latency",
        "host is missing",
        "sources.host",
    }


GEMM = {"m": 64, "n": 64, "k": 64, "layout": "TN", "dtype": "bf16", "output": "bf16", "accumulate": False}
MEASURED = [
    ({**GEMM, "count": 1, "time_us": 0}, "measured_gemms[0].time_us: 0 is out of range"),
    ({**GEMM, "count": 1, "time_us": 5, "layout": "TT"}, "measured_gemms[0].layout: 'TT' is not known"),
    ({**GEMM, "count": 1, "time_us": 5, "dtype": "bfloat16"}, "'bfloat16' is not known"),
    ({**GEMM, "time_us": 5}, "measured_gemms[0].count is missing"),
]


@pytest.mark.parametrize(("row", "expected"), MEASURED, ids=[row[1] for row in MEASURED])
def test_a_wrong_measured_row(row, expected):
    document = changed("measured_gemms", [row])
    document["sources"]["measured_gemms"] = "a stopwatch"
    with pytest.raises(ProfileError) as error:
        profile_from_mapping(document, "machine.yaml")
    assert expected in str(error.value)


def test_the_same_shape_measured_twice_leaves_open_which_time_holds():
    row = {**GEMM, "count": 1, "time_us": 5.0}
    document = changed("measured_gemms", [row, {**row, "time_us": 6.0}])
    document["sources"]["measured_gemms"] = "a stopwatch"
    with pytest.raises(ProfileError, match=r"measured_gemms\[1\] measures the same as measured_gemms\[0\]"):
        profile_from_mapping(document, "machine.yaml")


def test_a_table_needs_a_source():
    document = changed("measured_gemms", [{**GEMM, "count": 1, "time_us": 5.0}])
    with pytest.raises(ProfileError, match="nothing says where measured_gemms comes from"):
        profile_from_mapping(document, "machine.yaml")


def test_a_profile_without_a_source_cannot_be_written():
    profile = replace(load_profile("h100-sxm"), compute_capability=91, sources={})
    with pytest.raises(ProfileError, match="nothing says where sm_count"):
        profile_to_yaml(profile)


# ------------------------------------------------------------------------------------------- writing and reading

shares = st.floats(min_value=1e-6, max_value=1.5)
positive = st.floats(min_value=1e-9, max_value=1e12)
times = st.floats(min_value=0, max_value=1e9)
sizes = st.integers(min_value=1, max_value=2**40)
words = st.text(max_size=30).map(lambda text: f"<{text}>")
links = st.builds(LinkFigures, positive, shares, times, shares)
dtypes = st.sampled_from(DTYPES)
gemms = st.builds(
    MeasuredGemm,
    sizes,
    sizes,
    sizes,
    st.sampled_from(("TN", "NN", "NT")),
    dtypes,
    dtypes,
    st.booleans(),
    sizes,
    positive,
)
attentions = st.builds(
    MeasuredAttention,
    *[sizes] * 7,
    causal=st.booleans(),
    backward=st.booleans(),
    dtype=dtypes,
    time_us=positive,
)
collectives = st.builds(
    MeasuredCollective, st.sampled_from(CHOICES["communication"]), st.sampled_from(("domain", "fabric")),
    *[shares, times, times], group_size=st.integers(0, 1024),
)  # fmt: skip


def rows(kind, *identity):
    def key(row):
        return tuple(getattr(row, name) for name in identity)

    return st.lists(kind, max_size=4, unique_by=key).map(tuple)


profiles = st.builds(
    HardwareProfile,
    name=words,
    description=words,
    vendor=words,
    sm_count=st.integers(200, 1000),
    peak_tflops=st.dictionaries(dtypes, positive, min_size=1),
    gemm=st.builds(
        GemmFigures, st.lists(st.builds(GemmTile, sizes, sizes, shares), min_size=1, max_size=3).map(tuple),
        *[shares, shares, times, shares, times, shares],
    ),
    attention=st.builds(AttentionFigures, shares, shares, times, shares, small_head_ratio=shares),
    scan=st.builds(ScanFigures, shares, shares, times),
    memory=st.builds(MemoryFigures, positive, positive, shares, shares, shares, times, times),
    network=st.builds(NetworkFigures, sizes, links, links, times, st.booleans(), st.integers(0, 100)),
    host=st.builds(HostFigures, times),
    sources=st.just({}),
    compute_capability=st.integers(0, 200),
    measured_gemms=rows(gemms, "m", "n", "k", "layout", "dtype", "output", "accumulate", "count"),
    measured_attentions=rows(
        attentions, "batch", "query_length", "key_length", "heads", "kv_heads", "head_size", "value_head_size",
        *["causal", "backward", "dtype"],
    ),
    measured_collectives=rows(collectives, "communication", "tier", "group_size"),
    extra=st.dictionaries(words, words, max_size=3),
)  # fmt: skip


@given(profile=profiles, source=words)
@settings(max_examples=60, deadline=None)
def test_what_is_written_reads_back_equal(profile, source, tmp_path_factory):
    present = {"sm_count", "peak_tflops", "gemm", "attention", "memory", "network", "host"}
    present |= {"compute_capability"} if profile.compute_capability else set()
    present |= {"scan"} if profile.scan != ScanFigures() else set()
    tables = ("measured_gemms", "measured_attentions", "measured_collectives")
    present |= {table for table in tables if getattr(profile, table)}
    profile = replace(profile, sources=dict.fromkeys(sorted(present), source))
    text = profile_to_yaml(profile)
    path = tmp_path_factory.mktemp("profile") / "machine.yaml"
    path.write_text(text, encoding="utf-8")
    assert load_profile(path) == profile
    assert profile_to_yaml(load_profile(path)) == text


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates()
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = [
    f"{key}.{inner}" for key, value in toy().items() if isinstance(value, dict) for inner in value
] + list(toy())


@given(path=st.sampled_from(KEYS), value=trees)
@settings(max_examples=150, deadline=None)
def test_any_value_in_any_place_is_accepted_or_refused_with_a_profile_error(path, value):
    try:
        profile = profile_from_mapping(changed(path, value), "machine.yaml")
    except ProfileError as error:
        assert str(error).startswith("machine.yaml")  # noqa: PT017
    else:
        assert profile_from_mapping(yaml.safe_load(profile_to_yaml(profile)), "copy") == profile
