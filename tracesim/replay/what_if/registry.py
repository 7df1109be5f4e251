"""The list of what-ifs: each is a function of a rebuilt run and the text behind ``=``, and gives the changed run."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tracesim.errors import ScenarioError
from tracesim.replay.graph import Rebuilt
from tracesim.replay.what_if import communication, durations, hardware, host, placement

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


WHAT_IFS: tuple[WhatIf, ...] = (
    WhatIf("scale", "FACTOR", "durations of all device slices", durations.scale_all),
    WhatIf("scale.kind.", "FACTOR", "of one kind (gemm, collective, ...)", durations.scale_kind, True),
    WhatIf("scale.phase.", "FACTOR", "of one phase (forward, optimizer, ...)", durations.scale_phase, True),
    WhatIf("scale.layer.", "FACTOR", "of one layer", durations.scale_layer, True),
    WhatIf("scale.name", "PATTERN:FACTOR", "of slices whose name matches", durations.scale_name),
    WhatIf("set.name", "PATTERN:MICROSECONDS", "set them instead", durations.set_name),
    WhatIf("rank.", "FACTOR", "compute and host work of one rank", durations.scale_rank, True),
    WhatIf("fuse", "elementwise", "neighbouring kernels last as their longest", durations.fuse),
    WhatIf("hardware", "FROM:TO", "scale by the rooflines of two hardware profiles", hardware.move),
    WhatIf("network.bandwidth", "FACTOR", "bandwidth of communication", communication.bandwidth),
    WhatIf("network.latency", "FACTOR", "fixed time of communication", communication.latency),
    WhatIf("communication", "FACTOR", "its time; 0 takes waiting for peers away too", communication.scale),
    WhatIf("drop", "PATTERN", "take communication away by name", communication.drop),
    WhatIf("overlap", "none", "all slices of a rank after each other", placement.overlap),
    WhatIf("overlap", "full", "compute never waits for communication", placement.overlap),
    WhatIf("host", "FACTOR", "durations of calls and host work", host.scale),
    WhatIf("remove", "launch-gaps", "calls and short host work, as CUDA graphs do", host.remove),
    WhatIf("remove", "host-stalls", "host work of 200 us and more", host.remove),
    WhatIf("remove", "host-waits", "waits of the host for the device", host.remove),
    WhatIf("remove", "unexplained", "lateness without a cause", host.remove),
)
"""All of them, as the command line lists them."""


@dataclass(frozen=True)
class Applied:
    """A what-if as asked for."""

    what_if: WhatIf
    text: str
    """``key=value`` as given."""
    apply: Callable[[Rebuilt], Rebuilt]


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
            what_if = max(known, key=lambda w: len(w.key))
            argument = f"{key[len(what_if.key) :]}={value}" if what_if.prefix else value
            found.append(Applied(what_if, text, _bound(what_if.change, argument)))
    if problems:
        raise ScenarioError("\n".join(problems))
    return found


def _bound(change: Change, argument: str) -> Callable[[Rebuilt], Rebuilt]:
    return lambda rebuilt: change(rebuilt, argument)
