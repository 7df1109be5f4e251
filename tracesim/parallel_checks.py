"""Which combinations of experts, context parallelism, ZeRO stage and recompute are possible.

Sources: Megatron-Core ``parallel_state.py`` and ``transformer_config.py``; Transformer Engine's attention for what each
context-parallel algorithm takes; DeepSpeed and FSDP2 for the ZeRO stages.
"""

from __future__ import annotations

import math

from op_graphs.context_parallel.switched import a2a_degree
from op_graphs.model import MixtureOfExperts, ModelDescription
from op_graphs.overlap.registry import PARAMETERS
from op_graphs.parameters_checks import mixers_of
from op_graphs.plan import LibraryPlan, OverlapPlan, ParallelPlan, TrainingPlan
from op_graphs.recompute import INSIDE, KEEP_RULES, MODULE_RULES

from .scenario_fields import Problems


def check_experts(model: ModelDescription, parallel: ParallelPlan, problems: Problems) -> None:
    """Note degrees that the experts of the model, or the ranks of a stage, cannot be split by."""
    if not problems.sound("parallel.ep", "parallel.etp", "parallel.tp", "parallel.cp", "parallel.dp"):
        return
    ep, etp = parallel.ep, parallel.etp
    if model.moe is None:
        for name, degree in (("ep", ep), ("etp", etp)):
            if degree > 1:
                problems.add(f"parallel.{name}", degree, f"{model.name} has no experts; set it to 1")
        return
    moe = model.moe
    for name, degree, size, what in (
        ("ep", ep, moe.experts, "experts"),
        ("etp", etp, moe.expert_ffn_size, "columns of an expert"),
    ):
        if size % degree:
            fitting = [divisor for divisor in range(1, size + 1) if size % divisor == 0]
            nearest = min(fitting, key=lambda divisor: (abs(divisor - degree), divisor))
            problems.add(
                f"parallel.{name}",
                degree,
                f"does not divide the {size} {what} of {model.name}; nearest: {nearest}",
            )
    ranks = parallel.tp * parallel.cp * parallel.dp
    if ranks % (ep * etp):
        fitting = [degree for degree in range(1, ranks // etp + 1) if ranks % (degree * etp) == 0]
        nearest = min(fitting or [1], key=lambda degree: (abs(degree - ep), degree))
        problems.add(
            "parallel.ep",
            ep,
            f"times etp = {etp} does not divide the tp * cp * dp = {parallel.tp} * {parallel.cp} * {parallel.dp} = "
            f"{ranks} ranks of a stage; nearest ep: {nearest}",
        )
    _check_expert_order(parallel, problems)
    _check_capacity(moe, parallel, problems)
    if parallel.tp > 1 and not parallel.sp:
        problems.add(
            "parallel.sp",
            parallel.sp,
            f"experts with tp = {parallel.tp} need sequence parallelism, or every rank would route the same tokens; "
            "set sp: true",
        )


def _check_capacity(moe: MixtureOfExperts, parallel: ParallelPlan, problems: Problems) -> None:
    """Note padding that what brings a token once to a rank cannot send (Megatron-Core's flex dispatcher)."""
    path = "parallel.ep_dispatcher"
    padded = moe.capacity_factor is not None and moe.pad_to_capacity
    if padded and parallel.ep_dispatcher in ("deepep", "hybridep") and problems.sound(path):
        problems.add(
            path,
            parallel.ep_dispatcher,
            f"does not pad experts to their capacity (capacity_factor {moe.capacity_factor:g}); set ep_dispatcher: "
            "alltoall, or moe.pad_to_capacity: false",
        )


def check_permutation(model: ModelDescription, libraries: LibraryPlan, problems: Problems) -> None:
    """Note a choice of kernels for tokens of experts where there are none, or not those that it asks for."""
    weighted = "libraries.weighted_squared_relu_fusion"
    for path, value, differs in (
        ("libraries.permute_fusion", libraries.permute_fusion, not libraries.permute_fusion),
        ("libraries.router_fusion", libraries.router_fusion, libraries.router_fusion),
        ("libraries.grouped_mlp_fusion", libraries.grouped_mlp_fusion, libraries.grouped_mlp_fusion),
        ("libraries.experts_in_turn", libraries.experts_in_turn, libraries.experts_in_turn),
        (weighted, libraries.weighted_squared_relu_fusion, libraries.weighted_squared_relu_fusion),
    ):
        if model.moe is None and differs and problems.sound(path):
            problems.add(path, value, f"changes nothing: {model.name} has no experts; leave it out")
    path = "libraries.router_fusion"
    if libraries.router_fusion and not libraries.transformer_engine and problems.sound(path):
        problems.add(path, True, "is a kernel of Transformer Engine; set libraries.transformer_engine: true")
    other = model.moe is not None and model.activation != "squared_relu"
    if libraries.weighted_squared_relu_fusion and other and problems.sound(weighted):
        problems.add(
            weighted,
            True,
            f"is a kernel of squared_relu; the activation of {model.name} is {model.activation}",
        )


def check_grouped_mlp(
    model: ModelDescription,
    parallel: ParallelPlan,
    training: TrainingPlan,
    libraries: LibraryPlan,
    problems: Problems,
) -> None:
    """Note where Transformer Engine does not fuse the products of experts."""
    path = "libraries.grouped_mlp_fusion"
    if not libraries.grouped_mlp_fusion or model.moe is None or not problems.sound(path):
        return
    refused = (
        (training.recipe != "mxfp8", "training.dtype: mxfp8"),
        (model.activation != "swiglu", "model.activation: swiglu"),
        (parallel.etp > 1, "parallel.etp: 1"),
        (not libraries.transformer_engine, "libraries.transformer_engine: true"),
        (training.fp8_dispatch, "training.fp8_dispatch: false"),
        (training.fp8_storage, "training.fp8_storage: false"),
        ("moe_act" in training.recompute.modules, "no moe_act in training.recompute"),
        (bool({"expert_fc1", "moe_act"} & set(training.offload.modules)), "no experts in training.offload"),
    )
    needs = [rule for wrong, rule in refused if wrong]
    if needs:
        problems.add(path, True, f"needs {needs[0]}")


def _check_expert_order(parallel: ParallelPlan, problems: Problems) -> None:
    """Note a rank order that puts the experts of a rank on another pipeline stage than its attention."""
    order = parallel.order.split("-")
    if parallel.pp == 1 or order[-1] == "pp" or not problems.sound("parallel.order"):
        return
    before = order[: order.index("pp")]
    shared_by = parallel.expert_data_parallel_size
    dense = {"tp": parallel.tp, "cp": parallel.cp, "dp": parallel.dp}
    expert = {"tp": parallel.etp, "ep": parallel.ep, "dp": shared_by}
    distances = [math.prod(sizes.get(name, 1) for name in before) for sizes in (dense, expert)]
    if shared_by == parallel.dp and distances[0] == distances[1]:
        return
    problems.add(
        "parallel.order",
        parallel.order,
        f"puts pp = {parallel.pp} before another dimension, which Megatron-LM allows for experts only where as many "
        f"ranks share them as dp = {parallel.dp} (here {shared_by}) and stages keep their ranks; "
        f"nearest: {'-'.join([name for name in order if name != 'pp'])}-pp",
    )


def check_context_parallel(
    model: ModelDescription, parallel: ParallelPlan, training: TrainingPlan, problems: Problems
) -> None:
    """Note what the context-parallel algorithm cannot split."""
    if parallel.cp == 1 or not problems.sound("parallel.cp", "parallel.cp_comm", "parallel.tp"):
        return
    if training.attention == "unfused":
        problems.add("training.attention", training.attention, "cannot run with cp > 1; set attention: flash")
    for mixer in mixers_of(model):
        if problem := mixer.context_parallel_problem(model, parallel.tp, parallel.cp):
            problems.add("parallel.cp", parallel.cp, problem)
    attention = [layer for layer in model.layer_numbers if model.mixer(layer) == "attention"]
    if not attention:
        return
    kv_heads = max(1, (model.heads if model.latent_attention else model.kv_heads) // parallel.tp)
    if model.latent_attention and training.mla == "absorbed":
        # The latent is one head that all ranks share.
        kv_heads = 1
        if parallel.cp_comm.startswith("dtensor"):
            problems.add(
                "parallel.cp_comm",
                parallel.cp_comm,
                "repeats keys and values for every head, which mla: absorbed does not make; use p2p or allgather",
            )
    windowed = any(model.attention_window(layer) for layer in attention)
    if windowed and parallel.cp_comm not in ("a2a", "allgather"):
        problems.add(
            "parallel.cp_comm",
            parallel.cp_comm,
            f"cannot run the attention windows of {model.name}; use a2a or allgather",
        )
    if parallel.cp_comm == "a2a" and kv_heads % parallel.cp:
        fitting = [degree for degree in range(1, kv_heads + 1) if kv_heads % degree == 0]
        nearest = min(fitting, key=lambda degree: (abs(degree - parallel.cp), degree))
        problems.add(
            "parallel.cp",
            parallel.cp,
            f"does not divide the {kv_heads} key-value heads of a rank (tp = {parallel.tp}), over which a2a spreads; "
            f"nearest: {nearest}, or cp_comm: p2p",
        )
    if parallel.cp_comm == "a2a+p2p" and a2a_degree(parallel.cp, kv_heads) == 1:
        problems.add(
            "parallel.cp",
            parallel.cp,
            f"has no divisor that the {kv_heads} key-value heads of a rank divide by, so there is nothing to switch; "
            "use cp_comm: p2p",
        )


_WIDEST_FLASH_HEAD = 256
"""Elements of a head that FlashAttention up to its second generation takes."""


def check_latent_attention(
    model: ModelDescription, parallel: ParallelPlan, training: TrainingPlan, problems: Problems
) -> None:
    """Note what absorbed up-projections do not go with (Megatron-Core ``absorbed_mla.py``)."""
    path, latent = "training.mla", model.latent_attention
    if training.mla != "absorbed" or not problems.sound(path):
        return
    if latent is None:
        problems.add(path, "absorbed", f"belongs to latent attention, {model.name} has none; leave it out")
        return
    if parallel.tp > 1 and not parallel.sp and problems.sound("parallel.tp", "parallel.sp"):
        problems.add(
            path,
            "absorbed",
            f"gathers latents along the sequence with tp = {parallel.tp}; set parallel.sp: true",
        )
    if training.recipe is not None and problems.sound("training.dtype"):
        problems.add(
            path, "absorbed", "is not there for products in 8 or 4 bits; set dtype: bf16, or mla: expanded"
        )
    width = latent.kv_lora_rank + latent.qk_rope_head_size
    if training.attention in ("flash-1", "flash-2") and width > _WIDEST_FLASH_HEAD:
        problems.add(
            "training.attention",
            training.attention,
            f"takes heads of at most {_WIDEST_FLASH_HEAD} elements, with mla: absorbed they have {width}; set "
            "attention: flash, or mla: expanded",
        )


def _check_reshard(parallel: ParallelPlan, size: int, problems: Problems) -> None:
    """What FSDP2 asks of a number for ``reshard_after_forward``: a divisor of the shard group, not 1 nor all of it."""
    path = "parallel.reshard"
    if parallel.pp > 1:
        problems.add(
            path,
            size,
            f"keeps shards between a forward and its backward, and with pp = {parallel.pp} others come between; set "
            "reshard: always",
        )
        return
    groups = {"data-parallel": parallel.data_parallel_size}
    if parallel.ep > 1 and parallel.expert_data_parallel_size > 1:
        groups["expert data-parallel"] = parallel.expert_data_parallel_size
    for name, replicas in groups.items():
        shard = min(parallel.hsdp_shard or replicas, replicas)
        fitting = [divisor for divisor in range(2, shard) if shard % divisor == 0]
        if size not in fitting:
            near = min(fitting, key=lambda divisor: (abs(divisor - size), divisor), default=None)
            problems.add(
                path,
                size,
                f"is no divisor between 1 and the {shard} ranks of a shard group ({name}); nearest: {near or 'always'}",
            )
            return


def check_sharding(parallel: ParallelPlan, problems: Problems) -> None:
    """Note ZeRO stages that do not go with the rest of the plan."""
    if not problems.sound(
        "parallel.zero", "parallel.pp", "parallel.hsdp_shard", "parallel.dp", "parallel.cp"
    ):
        return
    if parallel.zero == 2 and parallel.pp > 1:
        problems.add(
            "parallel.zero",
            parallel.zero,
            f"scatters gradients after every microbatch, which a pipeline (pp = {parallel.pp}) accumulates; "
            "set zero: 1 or zero: 3",
        )
    if parallel.reshard != "default" and parallel.zero != 3 and problems.sound("parallel.reshard"):
        problems.add(
            "parallel.reshard",
            parallel.reshard,
            f"drops gathered weights, which only zero: 3 has (zero is {parallel.zero}); leave it out",
        )
    elif isinstance(parallel.reshard, int) and problems.sound("parallel.reshard"):
        _check_reshard(parallel, parallel.reshard, problems)
    if parallel.prefetch != 1 and not parallel.gathers_by_unit and problems.sound("parallel.prefetch"):
        problems.add(
            "parallel.prefetch",
            parallel.prefetch,
            "gathers weights of layers ahead, which only zero: 3 without a pipeline, or with reshard: always, does; "
            "leave it out",
        )
    shard = parallel.hsdp_shard
    if shard is None:
        return
    if parallel.zero == 0:
        problems.add("parallel.hsdp_shard", shard, "needs something that is sharded, zero is 0; leave it out")
    elif parallel.data_parallel_size % shard:
        ranks = parallel.data_parallel_size
        fitting = [divisor for divisor in range(1, ranks + 1) if ranks % divisor == 0]
        nearest = min(fitting, key=lambda divisor: (abs(divisor - shard), divisor))
        problems.add(
            "parallel.hsdp_shard",
            shard,
            f"does not divide the dp * cp = {ranks} data-parallel ranks; nearest: {nearest}",
        )


def check_whole_tensors(parallel: ParallelPlan, overlap: OverlapPlan, problems: Problems) -> None:
    """Note where tensors cannot lie whole on the ranks that update them."""
    path = "parallel.whole_tensors"
    if not parallel.whole_tensors or not problems.sound(path, "parallel.zero", "overlap.param_gather"):
        return
    if parallel.zero != 1:
        problems.add(
            path,
            True,
            f"spreads the states of zero: 1, and zero is {parallel.zero}; leave it out, or set zero: 1",
        )
    elif PARAMETERS.chosen(overlap.param_gather).in_forward:
        problems.add(
            "overlap.param_gather",
            overlap.param_gather,
            "gathers buckets in the forward pass, but whole tensors are broadcast behind the step; set it to false",
        )


def check_recompute(model: ModelDescription, training: TrainingPlan, problems: Problems) -> None:
    """Note recompute rules that are about something the model does not have, or that contain each other."""
    recompute = training.recompute
    if recompute.keep and problems.sound("training.recompute", "training.fp8_storage"):
        problem = KEEP_RULES[recompute.keep].problem(model, training)
        if problem:
            problems.note("training.recompute.keep", problem)
    path = "training.recompute.modules"
    if not problems.sound(path):
        return
    for module in recompute.modules:
        rule = MODULE_RULES[module]
        if not rule.needs(model):
            possible = [name for name, other in MODULE_RULES.items() if other.needs(model)]
            problems.add(path, module, f"{model.name} has no such module; it has {', '.join(possible)}")
        elif problem := rule.problem(model, training):
            problems.add(path, module, problem)
        for whole in rule.parts & INSIDE.keys():
            inner = [name for name in recompute.modules if MODULE_RULES[name].parts & INSIDE[whole]]
            if inner:
                problems.add(path, module, f"recomputes {whole.value} whole; leave out {' and '.join(inner)}")
