"""Launch scripts: which command trains, with which values, as bash would find them; nothing is run."""

from __future__ import annotations

import time

import pytest
from click.testing import CliRunner

from tracesim.cli import main
from tracesim.errors import ScenarioError
from tracesim.megatron import read_launch_file
from tracesim.megatron.shell import walk_script

TRAIN = "python pretrain_gpt.py --num-layers"


def last_command(script, **given):
    return walk_script(script, given).commands[-1]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        # variables and quotes
        ("N=12\nrun --num-layers $N", ["run", "--num-layers", "12"]),
        ("A='1 2'; run $A \"$A\" '$A' x${A}y", ["run", "1", "2", "1 2", "$A", "x1", "2y"]),
        ("run ${N:-8} ${E-x} ${N:+set} ${M:=4} $M", ["run", "8", "x", "4", "4"]),
        ('N=""; run ${N:-8} ${N-9} end', ["run", "8", "end"]),
        ("P=a/b.tar.gz; run ${P%.*} ${P%%.*} ${P##*/} ${P#a} ${P/a/c} ${#P} ${P^^}",
         ["run", "a/b.tar", "a/b", "b.tar.gz", "/b.tar.gz", "c/b.tar.gz", "10", "A/B.TAR.GZ"]),
        ("A=B; B=3; run ${!A}", ["run", "3"]),
        # what nothing sets, and what only a machine knows, stays as it is written
        ("run $1 ${DIR}/x $(date +%s) `pwd`/y", ["run", "${1}", "${DIR}/x", "$(date +%s)", "$(pwd)/y"]),
        ("run $1", ["run", "/data"]),
        # lines, comments, documents
        ("run a \\\n  b # c\n", ["run", "a", "b"]),
        ("cat <<EOF > x\nit's $N\nEOF\nrun y", ["run", "y"]),
        ("run x#y 2>&1 >log | tee -a z", ["tee", "-a", "z"]),
        # arrays
        ("A=(--a 1 # first\n  '--b 2')\nA+=(--c)\nrun ${A[@]} ${#A[@]} ${A[1]}",
         ["run", "--a", "1", "--b", "2", "--c", "4", "1"]),
        ('A=(x "y z"); run "${A[@]}"', ["run", "x", "y z"]),
        ("E=(); run ${E[@]} end", ["run", "end"]),
        # arithmetic
        ("G=8; N=2; run $(( $G * ${N} + 1 )) $((G / 3)) $((G % 3)) $(( (G - 1) * -1 ))", ["run", "17", "2", "2", "-7"]),
        ("run $((G * 2))", ["run", "$((G * 2))"]),
        ("TP=4; run $(( ($TP > 1) ? 1 : 0 )) $((TP == 1 ? 5 : TP))", ["run", "1", "4"]),
        ("run $(( 2 / 0 ))", ["run", "$((2 / 0))"]),
        # branches
        ("P=fp8\nif [ $P = bf16 ]; then A=1; elif [[ $P == fp* ]]; then A=2; else A=3; fi\nrun $A", ["run", "2"]),
        ('if [ -z "$X" ] || [ $Y -gt 1 ]; then A=1; else A=2; fi; run $A', ["run", "1"]),
        ("Y=2; if ! [ -n \"$X\" ] && [ $Y -gt 1 ]; then A=1; else A=2; fi; run $A", ["run", "1"]),
        ("if [ -f model.pt ]; then A=1; else A=2; fi; run $A", ["run", "2"]),
        ("A=1; [ $A -eq 2 ] && A=3; [[ $A -eq 1 || $A -lt 0 ]] && B=4; run $A $B", ["run", "1", "4"]),
        ('case "8B" in\n  "800M") N=1 ;;\n  7B|8B)\n    N=2\n    ;;\n  *) N=3;;\nesac\nrun $N', ["run", "2"]),
        ("for N in 4 8; do run $N; done", ["run", "4"]),
        ("while true; do run 1; done; run 2", ["run", "2"]),
        # functions, groups, declarations
        ("f() {\n local N=$1\n run $N $2\n}\nf 3 x", ["run", "3", "x"]),
        ("function f { run in; }; { f; }", ["run", "in"]),
        ("export A=1 B=2; declare -r C=3; unset B; run $A ${B:-none} $C", ["run", "1", "none", "3"]),
        ("TP=2 PP=4 bash x.sh --flag $TP", ["bash", "x.sh", "--flag", "2"]),
        # what a command runs in turn
        ("A='run x > log'; eval $A", ["run", "x"]),
        ("export C='run $N'; N=3; srun -l bash -c '$C y'", ["run", "$N", "y"]),
        # text that is no script goes on
        ("it's done\nrun x", ["run", "x"]),
        ("fi\n) }\nrun x", ["run", "x"]),
    ],
)  # fmt: skip
def test_what_a_script_would_run(script, words):
    given = {"1": "/data"} if "/data" in words else {}
    assert last_command(script, **given) == words


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        # Of several commands the one with a model, of several of these the last; what is printed is not run.
        (f"python prepare.py --input x --output y\n{TRAIN} 12\n", {"num-layers": 12}),
        (f"{TRAIN} 12\n{TRAIN} 24\n", {"num-layers": 24}),
        (f'CMD="{TRAIN} 12"\neval $CMD\necho $CMD --done\n', {"num-layers": 12}),
        # A command in a text, as srun and bash -c take it.
        (f"L='torchrun --nproc_per_node 4'\nsrun --wait=60 bash -c \"$L {TRAIN[7:]} 12 --spec 'a b'\"",
         {"num-layers": 12, "spec": "a b"}),
        # Without a script all flags are the model's, but for those of a launcher.
        ("--num-layers 12 --hidden-size 512 --nnodes 2", {"num-layers": 12, "hidden-size": 512}),
        # Without a command what variables hold.
        ('ARGS="--num-layers 12"\nMORE=(--bf16)\n', {"num-layers": 12, "bf16": True}),
        ("ARGS=' --num-layers 12'\nsbatch --export=ARGS --nodes=4 run.sh\n", {"num-layers": 12}),
        # Values: several words, negative numbers, an equals sign, a flag given twice.
        (f"{TRAIN} 12 --modules a b --x -1 --y=3 --x 2", {"num-layers": 12, "modules": ["a", "b"], "x": 2, "y": 3}),
    ],
)  # fmt: skip
def test_the_command_that_trains(tmp_path, script, arguments):
    path = tmp_path / "run.sh"
    path.write_text(script)
    assert read_launch_file(path).arguments == arguments


@pytest.mark.parametrize(
    ("command", "gpus"),
    [
        ("torchrun --nproc_per_node 8 --nnodes 4", 32),
        ("python -m torch.distributed.run --nproc-per-node=8", 8),
        ("deepspeed --num_gpus 4 --num_nodes 2", 8),
        ("torchrun --nproc_per_node 8 --nnodes $NODES", None),
        ("torchrun --nproc_per_node $GPUS", None),
        ("python", None),
    ],
)
def test_the_gpus_that_a_launcher_starts(tmp_path, command, gpus):
    path = tmp_path / "run.sh"
    path.write_text(f"{command} examples/pretrain_bert.py --num-layers 12")
    found = read_launch_file(path)
    assert (found.gpus, found.script, found.arguments) == (gpus, "pretrain_bert.py", {"num-layers": 12})


def test_a_loop_over_runs_is_told(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(f"for TP in 1 2 4; do\n {TRAIN} 12 --tensor-model-parallel-size $TP\ndone\n")
    found = read_launch_file(path)
    assert found.arguments["tensor-model-parallel-size"] == 1
    assert found.assumed == ("the script loops over 3 values of TP: 1",)


@pytest.mark.parametrize(
    "script",
    [
        "run ${A:-${A:-" * 60 + "x",
        "if true; then\n" * 2000,
        "A=xxxxxxxx\n" + "A=$A$A$A$A\n" * 40 + "run $A",
        "f() { f; f; }\nf\n",
        "\n".join(f"f{n}() {{ f{n + 1}; f{n + 1}; }}" for n in range(30)) + "\nf30() { x; }\nf0\n",
        "run ${",
    ],
)
def test_a_script_that_cannot_be_followed_is_refused(tmp_path, script):
    path = tmp_path / "run.sh"
    path.write_text(script)
    start = time.perf_counter()
    with pytest.raises(ScenarioError, match="cannot be read as a shell script"):
        read_launch_file(path)
    assert time.perf_counter() - start < 5


def test_a_script_that_sources_a_file_beside_it(tmp_path):
    beside, script = tmp_path / "config.sh", tmp_path / "run.sh"
    beside.write_text('ARGS=" --num-layers $LAYERS --hidden-size 64"\n')
    script.write_text(
        "LAYERS=12\n. `pwd`/config.sh\nsource /elsewhere/other.sh\npython pretrain_gpt.py $ARGS\n"
    )
    assert read_launch_file(script).arguments == {"num-layers": 12, "hidden-size": 64}
    beside.write_text(". ./config.sh\n")
    with pytest.raises(ScenarioError, match="nests too deep"):
        read_launch_file(script)


SCRIPT = """
if [ "$PRECISION" = fp8 ]; then EXTRA="--fp8-format hybrid"; fi
torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers $LAYERS --hidden-size 512 --num-attention-heads 8 \\
  --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 1 --bf16 --tensor-model-parallel-size ${TP:-2} \\
  --sequence-parallel $UNSET $EXTRA
"""


def imported(tmp_path, *options):
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT)
    return CliRunner().invoke(main, ["import-megatron", str(path), "--hardware", "h100-sxm", *options])


def test_variables_are_given_on_the_command_line(tmp_path):
    result = imported(
        tmp_path, "--variable", "LAYERS=24", "--variable", "TP=4", "--variable", "PRECISION=fp8"
    )
    assert result.exit_code == 0, result.output
    for line in ("layers: 24", "tp: 4", "dp: 2", "sp: true", "dtype: fp8-tensorwise"):
        assert f"  {line}\n" in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--num-layers ${LAYERS}: LAYERS is set nowhere in the file; say it with --variable LAYERS=..."),
        (["--variable", "LAYERS"], "--variable LAYERS: must be NAME=VALUE, such as TP=8"),
        (
            ["--variable", "LAYERS=24", "--variable", "TP=x"],
            "--tensor-model-parallel-size x: must be a whole number",
        ),
    ],
)
def test_variables_that_are_not_there_or_wrong(tmp_path, options, message):
    result = imported(tmp_path, *options)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_a_plan_that_the_launcher_does_not_fit(tmp_path):
    result = imported(tmp_path, "--variable", "LAYERS=24", "--variable", "TP=16")
    assert result.exit_code == 2  # 8 heads do not divide by 16
    script = SCRIPT.replace("--bf16", "--bf16 --pipeline-model-parallel-size 3")
    path = tmp_path / "run.sh"
    path.write_text(script)
    command = ["import-megatron", str(path), "--hardware", "h100-sxm", "--variable", "LAYERS=24"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    assert (
        "the launcher starts 8 GPUs, which the plan does not fit: the 6 it needs; --gpus says more"
        in result.output
    )


def test_variables_of_a_yaml_file(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text('ENV_VARS: {TP: 2}\nMODEL_ARGS: {--a: "${TP}", --b: "${PP:-4}", --c: "x${DP}"}\n')
    assert read_launch_file(path).arguments == {"--a": 2, "--b": 4, "--c": "x${DP}"}
    assert read_launch_file(path, {"TP": "8", "DP": "3"}).arguments == {"--a": 8, "--b": 4, "--c": "x3"}


def test_a_file_of_another_form_is_told_as_such(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("language_model: {num_layers: 2}\nmodel_parallel: {}\nseed: 1\n")
    with pytest.raises(ScenarioError, match="is a --yaml-cfg file of Megatron-LM"):
        read_launch_file(path)
