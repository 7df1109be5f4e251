"""The caching allocator against memory snapshots that PyTorch recorded in real training runs."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path
from typing import Any

import pytest

from tracesim.memory import AllocatorSettings, CachingAllocator, OutOfMemoryError

MIB = 1 << 20


class PlainUnpickler(pickle.Unpickler):
    """Reads dicts, lists, tuples, strings and numbers, and refuses to import anything."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a memory snapshot holds plain containers, not {module}.{name}")


def read_snapshot(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    with gzip.open(path) as file:
        snapshot = PlainUnpickler(file).load()
    return snapshot["segments"], next(trace for trace in snapshot["device_traces"] if trace)


def state_before(
    segments: list[dict[str, Any]], trace: list[dict[str, Any]]
) -> tuple[dict[int, Any], dict[int, int]]:
    """Segments and allocated blocks when recording began: the snapshot at its end with every event undone."""
    reserved = {s["address"]: (s["total_size"], s["segment_type"] == "small", s["stream"]) for s in segments}
    live = {b["address"]: b["size"] for s in segments for b in s["blocks"] if b["state"] != "inactive"}
    for event in reversed(trace):
        match event["action"]:
            case "alloc":
                del live[event["addr"]]
            case "free_completed":
                live[event["addr"]] = AllocatorSettings().round_request(event["size"])
            case "segment_alloc":
                del reserved[event["addr"]]
            case "segment_free":
                reserved[event["addr"]] = (event["size"], event["size"] == 2 * MIB, event["stream"])
    return reserved, live


def adopt(allocator: CachingAllocator, reserved: dict[int, Any], live: dict[int, int]) -> None:
    for address, (size, small, stream) in sorted(reserved.items()):
        inside = sorted((a, live[a]) for a in live if address <= a < address + size)
        ends = [a for a, _ in [*inside, (address + size, 0)]][1:]
        # The trace gives the request, the block may be larger: a large pool never keeps a gap of up to 1 MiB.
        blocks = [
            (a, end - a if not small and end - a - block <= MIB else block)
            for (a, block), end in zip(inside, ends, strict=True)
        ]
        allocator.adopt_segment(address, size, blocks, small=small, stream=stream)


SNAPSHOTS = [
    ("cs336_bcrafton.pickle.gz", 2162, 0),
    ("cs336_wl_medium_128_training.pickle.gz", 6526, 0),
    ("torchtitan_llama3_8b_fsdp16/rank0_memory_snapshot.pickle.gz", 1231, 164),
    ("torchtitan_llama3_8b_fsdp16/rank1_memory_snapshot.pickle.gz", 1231, 164),
]


@pytest.mark.shared_data
@pytest.mark.parametrize(("name", "allocations", "new_segments"), SNAPSHOTS)
def test_recorded_runs_get_the_address_that_pytorch_gave(
    shared_data: Path, name: str, allocations: int, new_segments: int
) -> None:
    """Real snapshots: each allocation lands on the recorded address, each ``cudaMalloc`` has the recorded size."""
    segments, trace = read_snapshot(shared_data / "traces" / "memsnap" / name)
    recorded = [event for event in trace if event["action"] == "segment_alloc"]
    asked: list[int] = []

    def place(size: int) -> int:
        asked.append(size)
        return int(recorded[len(asked) - 1]["addr"])

    allocator = CachingAllocator(place_segment=place)
    adopt(allocator, *state_before(segments, trace))
    same = total = 0
    for event in trace:
        if event["action"] == "alloc":
            total += 1
            same += allocator.allocate(event["size"], event["stream"]) == event["addr"]
        elif event["action"] == "free_completed":
            allocator.free(event["addr"])
        elif event["action"] == "oom":
            # Recorded where the device was full: all cached segments go, and still there is no room.
            allocator.device_bytes = allocator.reserved_bytes
            with pytest.raises(OutOfMemoryError):
                allocator.allocate(event["size"], event["stream"])
    assert (same, total) == (allocations, allocations)
    assert asked == [event["size"] for event in recorded]
    assert len(asked) == new_segments
    assert allocator.segments() == sorted((s["address"], s["total_size"]) for s in segments)
    assert allocator.reserved_bytes == sum(s["total_size"] for s in segments)
    assert allocator.allocated_bytes == sum(s["allocated_size"] for s in segments)


FROM_EMPTY = [
    # snapshot                                                      reserved error in percent
    ("cs336_bcrafton.pickle.gz", -1.63),
    ("cs336_wl_medium_128_training.pickle.gz", -0.23),
    ("torchtitan_llama3_8b_fsdp16/rank0_memory_snapshot.pickle.gz", 0.0),
    ("torchtitan_llama3_8b_fsdp16/rank1_memory_snapshot.pickle.gz", 0.0),
]


@pytest.mark.shared_data
@pytest.mark.parametrize(("name", "error_percent"), FROM_EMPTY)
def test_peak_reserved_without_knowing_any_address(
    shared_data: Path, name: str, error_percent: float
) -> None:
    """As in a simulation: start from an empty device, with what was live when recording began allocated first."""
    segments, trace = read_snapshot(shared_data / "traces" / "memsnap" / name)
    reserved, live = state_before(segments, trace)
    measured = peak = sum(size for size, _, _ in reserved.values())
    for event in trace:
        measured += {"segment_alloc": event["size"], "segment_free": -event["size"]}.get(event["action"], 0)
        peak = max(peak, measured)
    allocator = CachingAllocator()
    address = {recorded: allocator.allocate(size) for recorded, size in sorted(live.items())}
    for event in trace:
        if event["action"] == "alloc":
            address[event["addr"]] = allocator.allocate(event["size"], event["stream"])
        elif event["action"] == "free_completed":
            allocator.free(address.pop(event["addr"]))
    assert 100 * (allocator.peak_reserved_bytes / peak - 1) == pytest.approx(error_percent, abs=0.01)
