"""What is known of each source beside its rows: what ran, in which fit it was, and what explains its errors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SourceNote:
    """Words for the accuracy page."""

    runs: str = ""
    in_fit: str = "no"
    explains: str = ""


NOTES: dict[str, SourceNote] = {
    "simumax-b200": SourceNote(
        "Llama 3 70B (12 layers, to 131,072 tokens with context parallelism) and DeepSeek-V2 (4 layers) on 8 B200; "
        "kernels measured",
        "clock: 8 of 22 rows",
        "tp 8 and experts are too fast, at few microbatches most: 110 collectives of eight ranks a microbatch wait "
        "for the slowest rank, which is not modelled, and the small kernels of routing are many. Only iterations 2 and "
        "3 were timed",
    ),
    "simumax-a100-pcie": SourceNote(
        "Llama 3 8B on 8 A100 PCIe; kernels measured; times are not printed by the source, but its predictions over "
        "the error it states",
        "clock: 8 of 12 rows",
        "tp 8 runs over PCIe, where all is the measured line of one all-gather",
    ),
    "korthikanti2022": SourceNote(
        "GPT 22B to 530B, 8 to 2,240 A100 (arXiv:2205.05198)",
        "no",
        "the 530B model with full recompute is too slow: 35 stages wait for transfers at every action",
    ),
    "flagperf": SourceNote(
        "Llama 3 8B and 70B, 8 to 440 A100, A800, H100",
        "no",
        "two fp8 rows on H100, ten points faster since the rate of 8-bit products is that of Megatron-Bridge's rows; "
        "440 GPUs: data parallelism of 220 over a network with contention",
    ),
    "llm-foundry-mpt": SourceNote(
        "MPT 125M to 70B with FSDP, 8 to 512 A100 and H100",
        "clock of the H100: 9 rows; rank_jitter: ten layouts; generations of attention: 25 rows",
        "30B on 8 GPUs and 13B on cards of 40 GB, which nearly fill their memory, are the slow ones: retries of the "
        "allocator are not modelled",
    ),
    "vtrain-ground-truth": SourceNote(
        "GPT of width 1,024 to 12,288, 412 of 443 rows on one node of A100, which are sums of parts (below)",
        "host.operation_us: 220 rows",
        "small models, bound by launches, whose parts scatter by a quarter with the same launches; layers with "
        "all-reduces of 16 MiB and more took longer",
    ),
    "zero-bubble": SourceNote(
        "GPT 1.5B to 28B with several schedules, 8 to 32 A100 (arXiv:2401.10241)",
        "host.resume_us: 6 rows, by the paper's own profile; gemm.dtypes.fp16: its passes for weights",
        "a GELU that is not fused forward is inferred from the paper's profile, not stated; steps of the automatic "
        "schedules take 6 to 12 % longer than the paper's own calculation from its profile, for which contention with "
        "transfers explains a part here, least with 32 stages",
    ),
    "internevo": SourceNote(
        "InternLM 7B, 8 to 1,024 A100",
        "no",
        "its layers are less fused than those of Megatron-LM, which is read from its code; what is left, 5 to 9 % at 8 "
        "to 64 GPUs, was not found. Broadcasts by 256 owners over 32 nodes take twice as long as rings one after "
        "another",
    ),
    "bigscience-tr11": SourceNote(
        "GPT 177B to 200B in BLOOM's preparations, 320 to 384 A100",
        "no",
        "experiments on a cluster in construction, with frameworks of 2021; the causes were not separated",
    ),
    "torchtitan-bench": SourceNote(
        "Llama 3 8B to 405B with FSDP2, 8 to 512 H100 of 96 GB and 500 W, and H200",
        "no",
        "context parallelism over four and eight GPUs of a node is 18 to 21 % too fast, with the kernels and exchanges "
        "of PyTorch's own ring; over two it is 9 % too slow, over four nodes 6 %. What is missing grows as the bytes "
        "that are exchanged, as if they took 45 GB/s, an eighth of what the node has; nothing in the ring's code says "
        "why. Llama 3 405B in pipelines is 7 to 9 % too fast",
    ),
    "torchtitan-perf-2024": SourceNote("Llama 2 and 3 with FSDP2 on 64 A100"),
    "megatron-bridge": SourceNote(
        "NeMo recipes on H100 to GB300",
        "rate of 8-bit products: 49 dense rows, those of nemo-* included; host.operation_us of the H100: 13 rows",
        "mixtures of experts: what the host takes for eager ones, and fused kernels of the captured ones that are "
        "not lowered; recipes are read by release where a row does not state them. Nemotron 3 is 3 to 22 % too "
        "fast, most on GB200 and with NVFP4; the cause was not found: scans are costed by timings of other "
        "sources, their gradients by one training rate. The step of GPT OSS in 26.06.01 took 1.6 times what the "
        "same recipe took in 26.06 and 26.08",
    ),
    "megatron-golden": SourceNote("functional tests of Megatron-LM, memory of the last rank"),
    "megatron-bridge-ablations": SourceNote(
        "Moonlight 16B on 8 H100, Nemotron 3 Nano on 16 and Llama 3 70B fine-tuned on 32, with one setting changed "
        "at a time",
        "no",
        "one small microbatch a step, so what the host does decides; the rows are meant for their differences",
    ),
    "megatron-sc21": SourceNote("GPT 162B to 530B on 384 to 1,536 A100 (arXiv:2104.04473)"),
    "moe-modelzoo": SourceNote(
        "Qwen3-235B-A22B and Qwen3-Next on H100, GB200 and GB300, launch scripts of Megatron-MoE-ModelZoo"
    ),
    "nemo-24.07": SourceNote(
        "NeMo recipes on H100 in fp8, 2024; the page does not say what is recomputed",
        "rate of 8-bit products",
    ),
    "nemo-24.12": SourceNote("the same half a year later", "rate of 8-bit products"),
    "nemo-25.02-25.04": SourceNote(
        "NeMo recipes on H100, B200 and GB200 in fp8, 2025", "rate of 8-bit products"
    ),
    "fms-fsdp": SourceNote("Llama 2 with FSDP and torch.compile on A100"),
    "calculon-validation": SourceNote(
        "memory of the layers of GPT 22B to 1T by the formulas of arXiv:2205.05198, read off its figures by Calculon's "
        "authors: a test of formulas",
    ),
    "nemo-automodel": SourceNote(
        "DeepSeek-V3, Kimi K2, and adapters of Llama 3 and Qwen 2.5, with FSDP2 on H100"
    ),
    "nemo-longseq": SourceNote("Llama 2 7B and 3 8B on sequences of 16k to 1M tokens; time from TFLOP/s"),
    "ccl-bench": SourceNote(
        "Llama 3.1 8B on four A100 of Perlmutter, steps of 512 tokens a sequence under the profiler",
        "no",
        "short steps bound by the host, whose work the profiler adds to; not in the ranges",
    ),
}
"""By source."""


def note_of(source: str) -> SourceNote:
    """What is known of a source; empty for one that is not listed."""
    return NOTES.get(source, SourceNote())
