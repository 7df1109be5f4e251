"""The list of what-ifs: each is a function of a rebuilt run and the text behind ``=``, and gives the changed run."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tracesim.errors import ScenarioError
from tracesim.replay.graph import Rebuilt
from tracesim.replay.what_if import (
    communication,
    durations,
    hardware,
    host,
    multiprocessors,
    network,
    pipeline,
    placement,
    recompute,
    shapes,
    stragglers,
    streams,
)
from tracesim.replay.what_if.memory import MemoryEffect, unchanged

Change = Callable[[Rebuilt, str], Rebuilt]


@dataclass(frozen=True)
class WhatIf:
    """One change a replay can make."""

    key: str
    value: str
    """How its value is written."""
    says: str
    change: Change
    prefix: bool = False
    """Whether the key goes on with a name, as in ``scale.kind.gemm``."""
    memory: Callable[[Rebuilt, str], MemoryEffect] = unchanged
    """What it does to the memory of a run that it is asked of."""
    readings: tuple[Change, ...] = ()
    """Other readings of the same words; the step times of all of them are the range."""
    needs_origins: bool = False
    """Whether it reads arguments that a trace is only read with if asked (``keep_origins``)."""


WHAT_IFS: tuple[WhatIf, ...] = (
    WhatIf("scale", "FACTOR", "durations of all device slices", durations.scale_all),
    WhatIf("scale.kind.", "FACTOR", "of one kind (gemm, collective, ...)", durations.scale_kind, True),
    WhatIf("scale.phase.", "FACTOR", "of one phase (forward, optimizer, ...)", durations.scale_phase, True),
    WhatIf("scale.layer.", "FACTOR", "of one layer", durations.scale_layer, True),
    WhatIf("scale.name", "PATTERN:FACTOR", "of slices whose name matches", durations.scale_name),
    WhatIf(
        "scale.shape",
        "PATTERN:FACTOR",
        "of slices whose operator and input shapes match",
        shapes.scale_shape,
        needs_origins=True,
    ),
    WhatIf("set.name", "PATTERN:MICROSECONDS", "set them instead", durations.set_name),
    WhatIf("rank.", "FACTOR", "compute and host work of one rank", durations.scale_rank, True),
    WhatIf("even", "stragglers", "the same slice lasts as long everywhere", stragglers.without_stragglers),
    WhatIf("even", "both", "and nothing starts late without a cause", stragglers.without_stragglers),
    WhatIf("fuse", "elementwise", "neighbouring kernels last as their longest", durations.fuse),
    WhatIf(
        "hardware",
        "FROM:TO",
        "scale by the rooflines of two hardware profiles",
        hardware.move,
        readings=(hardware.move_at_best, hardware.move_at_worst),
    ),
    WhatIf("network.bandwidth", "FACTOR", "bandwidth of communication", communication.bandwidth),
    WhatIf("network.latency", "FACTOR", "fixed time of communication", communication.latency),
    WhatIf("network.algorithm", "[FROM:]TO", "collectives by ring, tree, nvls, ...", network.algorithm),
    WhatIf("network.topology", "[FROM:]TO", "the network of another hardware profile", network.topology),
    WhatIf("network.domain", "GPUS", "GPUs joined by fast links", network.domain),
    WhatIf(
        "dp",
        "RANKS",
        "data-parallel ranks, each as those there are",
        network.data_parallel,
        memory=network.data_parallel_memory,
    ),
    WhatIf("communication", "FACTOR", "its time; 0 takes waiting for peers away too", communication.scale),
    WhatIf("drop", "PATTERN", "take communication away by name", communication.drop),
    WhatIf(
        "communication.sms",
        "[FROM:]TO",
        "SMs of collectives: compute beside them faster, they slower",
        multiprocessors.communication_sms,
        readings=(multiprocessors.least_effect, multiprocessors.link_bound),
    ),
    WhatIf(
        "stream.",
        "STREAM",
        "a kind (gemm, all_gather, ...) on another stream, or a new one",
        streams.move_kind,
        True,
        readings=(streams.kind_waited,),
    ),
    WhatIf(
        "stream.name",
        "PATTERN:STREAM",
        "slices whose name matches",
        streams.move_name,
        readings=(streams.name_waited,),
    ),
    WhatIf("overlap.", "none", "one kind in the queue of compute", placement.overlap_kind, True),
    WhatIf("overlap.", "full", "nothing waits for one kind", placement.overlap_kind, True),
    WhatIf("overlap", "none", "all slices of a rank after each other", placement.overlap),
    WhatIf("overlap", "full", "compute never waits for communication", placement.overlap),
    WhatIf(
        "microbatches",
        "NUMBER",
        "microbatches of a step",
        pipeline.microbatches,
        memory=pipeline.microbatch_memory,
    ),
    WhatIf(
        "schedule",
        "NAME",
        "pipeline schedule (1f1b, zb-h1, ...) or CSV file",
        pipeline.schedule,
        memory=pipeline.schedule_memory,
    ),
    WhatIf(
        "recompute.on",
        "PATTERN",
        "a module runs again in its backward",
        recompute.recompute_on,
        memory=recompute.on_memory,
    ),
    WhatIf(
        "recompute.off",
        "PATTERN",
        "a module does not run again",
        recompute.recompute_off,
        memory=recompute.off_memory,
    ),
    WhatIf("host", "FACTOR", "durations of calls and host work", host.scale),
    WhatIf("remove", "launch-gaps", "calls and short host work, as CUDA graphs do", host.remove),
    WhatIf("remove", "host-stalls", "host work of 200 us and more", host.remove),
    WhatIf("remove", "host-waits", "waits of the host for the device", host.remove),
    WhatIf("remove", "allocator", "calls that get or free device memory", host.remove),
    WhatIf("remove", "unexplained", "lateness without a cause", host.remove),
)
"""All of them, as the command line lists them."""


@dataclass(frozen=True)
class Applied:
    """A what-if as asked for."""

    what_if: WhatIf
    text: str
    """``key=value`` as given."""
    argument: str
    """What its functions take: the value, behind ``name=`` if the key goes on with a name."""

    def apply(self, rebuilt: Rebuilt, reading: int = -1) -> Rebuilt:
        """The changed run; in one of the other readings where there is one of that number."""
        readings = self.what_if.readings
        change = readings[reading] if 0 <= reading < len(readings) else self.what_if.change
        return change(rebuilt, self.argument)

    def memory(self, rebuilt: Rebuilt) -> MemoryEffect:
        """What becomes of the memory of a run without this change."""
        return self.what_if.memory(rebuilt, self.argument)


def parse_what_ifs(texts: Sequence[str]) -> list[Applied]:
    """Find the what-ifs of ``key=value`` texts.

    Raises:
        ScenarioError: one message for all texts that are not understood, with the nearest keys.
    """
    found, problems = [], []
    keys = list(dict.fromkeys(w.key for w in WHAT_IFS))
    for text in texts:
        key, equals, value = text.partition("=")
        known = [w for w in WHAT_IFS if w.key == key or (w.prefix and key.startswith(w.key) and key != w.key)]
        if not equals or not value:
            problems.append(f"--what-if {text}: no value. Write KEY=VALUE, as in scale.kind.gemm=0.5")
        elif not known:
            near = difflib.get_close_matches(key, keys, n=2, cutoff=0.4)
            hint = f"Did you mean {' or '.join(near)}?" if near else f"Known are {', '.join(keys)}"
            problems.append(f"--what-if {text}: no what-if {key!r}. {hint}")
        else:
            # A whole key stands before a longer one with a name in it.
            what_if = max(known, key=lambda w: (not w.prefix, len(w.key)))
            argument = f"{key[len(what_if.key) :]}={value}" if what_if.prefix else value
            found.append(Applied(what_if, text, argument))
    if problems:
        raise ScenarioError("\n".join(problems))
    return found
