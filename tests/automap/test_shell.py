"""Scripts of the shell that are read without being run: bash itself says what they start."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from automap.errors import PlanError
from automap.export import shell_syntax
from automap.export.reading import read_configuration
from automap.export.shell import commands
from automap.export.shell_conditions import plain

SCRIPTS = {
    "array": """
N=4
ARGS=(
    --tp $N   # in the host
    # --pp 2
    --name "two words" --path='a b' \\
    --batch "$(( N * (N + 1) / 3 ))"
)
ARGS+=(--more "${N}x")
torchrun "${ARGS[@]}" ${#ARGS[@]} ${ARGS[1]} "-all ${ARGS[*]}" x"${ARGS[@]}"y \\
    --last ;
""",
    "text": """
TP="${TP:-8}"; SEQ=${SEQ-2048}; : ${PP:=3}
OPTIONS=" \\
    --tp ${TP} \\
    --seq $SEQ --pp $PP "
[ "$TP" -gt 4 ] && OPTIONS="$OPTIONS --big"
[[ $TP == 9 || -z "$PP" ]] && OPTIONS+=" --wrong" || OPTIONS+=" --right"
CMD="torchrun train.py $OPTIONS > /dev/stdout 2>&1"
eval $CMD
""",
    "branches": """
SIZE=70b; KIND=fp8; ONE=()
if [[ "$SIZE" == 7b ]]; then L=32; H=4096
elif [ "$SIZE" = 70b ] && [ ! -z $KIND ]; then
    L=80
    case $KIND in
        bf16|fp16) ONE=(--half) ;;
        fp*) ONE=(--fp8 "hybrid one") ;;
        *) echo none; exit 1 ;;
    esac
else
    echo "which?" >&2; exit 1
fi
if [ $# -gt 3 ]; then L=1; fi
for K in 12; do ONE+=(--k $K); done
torchrun --layers $L "${ONE[@]}" ${MORE:+--more}
""",
    "functions": """
train() {
    local tp=$1
    shift_of=${2:-none}
    torchrun --tp $tp --kind ${shift_of} "$@"
}
function other { torchrun never; }
(( W = 2 * 8 + 3 % 2 ))
train $((W - 1)) 'x y'
""",
    "documents": """
cat > /dev/null <<EOF
torchrun --not this $HOME 'quote
EOF
cat <<-'END' > /dev/null
	it's not
	END
bash -c 'torchrun --inner "a b" && true' | cat
""",
    "broken": """
torchrun --one 1 \\
    # --two 2 \\
    --three 3 2>/dev/null || true
echo "torchrun --printed" > /dev/null
""",
    "defaults": """
A=${A:-${B:-"x y"}}; C='$A'; D=\\$A; E=$'q'; F=`echo 1 >/dev/null`
torchrun "$A" $A $C "$D" $E "${A}z"'w' ${UNSET_ONE+"never"} -- "" "\\"in\\\\" a\\ b
""",
    # What a shell of its own, a function or a command sets ends with it.
    "scopes": """
TP=1; PP=1; EP=1; CP=1; VP=1
( TP=9; torch_is_never_started=1 ); echo 9 | PP=9; x=$(EP=9); CP=9 true; bash -c 'VP=9'
train() {
    local TP=$1 SP=${2:+--sp}; shift 2
    DP=$((TP * 2))
    torchrun --tp $TP $SP "$@" $#
}
{ CP=3; }
[ -f /nowhere ] && true || OTHER=1
train 4 2 --bf16 "a b" $TP $PP $EP $CP $VP
set -- x "y z"; shift
""",
    "forms": """
declare -A LAYERS=([small]=12 [large]=24); SIZE=large; WHICH=SIZE
FILE=/data/gpt-345m.v2.json; BASE=${FILE##*/}; LIST=(--a 1 "b c" --d); LIST[4]=e; TEXT="${LIST[@]}"
USE=true; OFF=false; EXTRA=()
$USE && EXTRA+=(--use)
if $OFF; then EXTRA+=(--never); fi
torchrun ${LAYERS[$SIZE]} ${LAYERS[small]} ${!WHICH} ${BASE%%.*} ${FILE%/*} ${BASE#*.} ${BASE//-/_} ${BASE/gpt/x} \
    ${#BASE} ${BASE:4:3} ${BASE: -4} ${SIZE^^} ${SIZE^} "${LIST[@]:1:2}" "${LIST[-1]}" "${LIST[@]%c}" ${LIST[@]:3} \
    "$TEXT" "${EXTRA[@]}" ${NONE:-} "${NONE:-}" ${SIZE:+--has "x y"} `# a comment` $(echo --pp 2) $'a\\tb'
""",
    "inputs": """
IFS=',' read -r TP PP REST <<< "4,2,1,8"
read -r -d '' CMD <<EOF
    --tp $TP
    --pp $PP \\$HOME
EOF
while getopts "t:p:" opt; do case $opt in t) TP=$OPTARG ;; esac; done
while [[ $# -gt 0 ]]; do case $1 in --tp) TP=$2; shift 2 ;; esac; done
torchrun $CMD --rest "$REST" --tp $TP
""",
    "braces": r"""
N=3; A={1,2}; LIST=(--x{1..3} {a,b}{c,d}); E='{q,r}'
torchrun {2,4} --{tensor,pipeline}-size=$N {1..4} {4..1..2} {08..11} {-01..2} {a..e..2} {C..A} x{,y}z {a,{b,c}d,}e \
    {} {a} {1..$N} {a,b"," c} {"x y",$N} "{1,2}" \{1,2} {1,2\} {a,{b,c} {{d,e}} {1..2}{3,4} "${LIST[@]}" $A $E z/{u,v} \
    --json='{"a": 1, "b": {1,2}}' {"k":1,"l":2} {1.5..2} {2..-2..0} {aa..c} {,} ${N}{x,y} ,{,},
""",
    "numbers": """
A=7; B=0; let "C = A * 2" D=3; ((E = A ** 2, F = -A / 2)); let G=A%4; ((A > 5 ? (H = 1) : (H = 2)))
((A += 3)); I=$((A++ + --D)); ((B)) || J=--zero; ((B == 0 && A)) && K=--one
torchrun $A $C $D $E $F $G $H $I $J $K $((0x1f + 010 + 2#101)) $((1 << 4 | 3 ^ 1 & 7)) $((!A + ~B)) $(( (A, B) ))
""",
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("name", SCRIPTS)
def test_words_are_those_of_bash(name: str, tmp_path: Path) -> None:
    stub = tmp_path / "torchrun"
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    ran = subprocess.run(
        ["bash", "-c", SCRIPTS[name]], capture_output=True, text=True, cwd=tmp_path, env={"PATH": path}, check=False
    )
    started, *_ = commands(SCRIPTS[name])
    (words,) = [[plain(word) for word in one[1:]] for one in started if one[0] == "torchrun"]
    assert words == ran.stdout.splitlines()


def test_a_parser_that_does_not_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    endless = tmp_path / "shfmt"
    endless.write_text("#!/bin/sh\nexec sleep 1000\n")
    endless.chmod(0o755)
    monkeypatch.setattr(shell_syntax, "_program", lambda: str(endless))
    monkeypatch.setattr(shell_syntax, "_MAX_WAIT_S", 0.1)
    with pytest.raises(PlanError, match=r"could not be read within 0.1 s"):
        shell_syntax.parse("torchrun a.py")


TRAIN = 'torchrun pretrain_gpt.py "${ARGS[@]}"'


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        ("torchrun a.py --tensor-model-parallel-size $TP", "--tensor-model-parallel-size", r"\$TP"),
        ("N=$(cat n | wc -l)\ntorchrun a.py --micro-batch-size $N", "--micro-batch-size", r"cat n \| wc -l"),
        ("ARGS=(--bf16)\nif [ -f x ]; then ARGS+=(--sequence-parallel); fi\n" + TRAIN, "--sequence-parallel", "condit"),
        ("for N in 1 2; do torchrun a.py --micro-batch-size $N; done", "--micro-batch-size", "each N of a loop"),
        ("torchrun a.py --bf16 \\\n  # --fp16 \\\n  --micro-batch-size 2", "--micro-batch-size", "a comment stands"),
        ("torchrun a.py --bf16\ntorchrun b.py --fp16", "--bf16", "differs"),
        ("torchrun a.py --$KIND --micro-batch-size 2", "--$KIND", "name is not known"),
        ("ARGS=('--fp8-format hybrid')\n" + TRAIN, "--fp8-format", "one word"),
        ("torchrun a.py --tensor-model-parallel-size {2,4}", "--tensor-model-parallel-size", "several values"),
        ("for N in {1..4}; do torchrun a.py --micro-batch-size $N; done", "--micro-batch-size", "each N of a loop"),
        ("torchrun a.py --bf16 {1..9999999}", "script", "characters"),
        ("torchrun a.py --bf16 " + "{1..99}" * 9, "script", "characters"),
        ("torchrun run_clm.py --bf16 --per_device_train_batch_size 2", "--per_device_train_batch_size", "transformers"),
        ("torchrun a.py --micro-batch-size 1 --yaml-cfg a.yaml", "--yaml-cfg", "not priced"),
        ("torchrun a.py --num-layers 61 --mtp-num-layers 1", "--mtp-num-layers", "not priced"),
        ("torchrun a.py --bf16 --fine-grained-activation-offloading", "--fine-grained-activation-offloading", "priced"),
        ("torchrun a.py --context-parallel-size 2 --cp-comm-type a2a", "--cp-comm-type", "as a ring"),
        ("torchrun a.py --bf16 --ds-sequence-parallel-size 4", "--ds-sequence-parallel-size", "exchanging heads"),
        ("torchrun -m torchtitan.train --job.config_file a/b.toml", "", "no arguments of Megatron-LM"),
        ("sbatch --nodes=4 train.sh", "", "no arguments of Megatron-LM"),
        ("if true; then torchrun --bf16", "script", "fi"),
        ("f() { f; }\nf", "script", "calls itself"),
        ("A=12345678\n" + "A=$A$A\n" * 40 + "torchrun --bf16 $A", "script", "characters"),
        (
            "f() { :; :; }\n" + "".join(f"f{n}() {{ f{n - 1}; f{n - 1}; }}\n" for n in range(1, 40)) + "f39",
            "script",
            ".",
        ),
        ("cat <<A <<B\n" * 2000, "script", "unclosed here-document"),
        ("echo " + "$(" * 250 + ")" * 250, "script", "nested"),
        ("if true; then " * 200 + ":; " + "fi; " * 200, "script", "nested"),
        ("# " * (1 << 15) + "\ntorchrun", "script", "more than"),
    ],
)
def test_what_only_a_run_could_tell_is_refused(text: str, field: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "a.sh"
    path.write_text(text.replace("f0;", "f;"))
    with pytest.raises(PlanError, match=words) as fault:
        read_configuration(path)
    assert fault.value.field == (f"from.{field}" if field else "from")


def test_a_script_with_options_of_all_kinds(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(
        """#!/bin/bash
#SBATCH --nodes=4
TP=${TP:-4}; MBS=2; DTYPE=fp8
NNODES=${SLURM_NNODES:-1}
EXTRA=()
if [[ "$DTYPE" == "fp8" ]]; then EXTRA+=("--fp8-format hybrid" "--fp8-recipe mxfp8"); fi
if [ -n "$WANDB_API_KEY" ]; then EXTRA+=(--wandb-project mine); fi
OPTIONS=" \\
    --tensor-model-parallel-size $TP --micro-batch-size $MBS \\
    --global-batch-size $((MBS * 16)) --num-layers 6 --bf16 --checkpoint-activations \\
    --data-path $DATA --deepspeed --zero-stage 2"
python tools/preprocess_data.py --workers 8
srun --ntasks-per-node 1 bash -c "torchrun --nproc_per_node 8 --nnodes $NNODES pretrain_gpt.py $OPTIONS ${EXTRA[*]}"
"""
    )
    found = read_configuration(path)
    assert found.degrees == {"tp": 4, "micro_batch": 2, "recompute": "full", "zero": 2, "dp": 8}
    said = {"global_batch": 32, "precision": "mxfp8", "trainer": "megatron-deepspeed", "vocabulary_multiple": 512}
    assert found.training == said
    # Four hosts are those of #SBATCH; what differs from the defaults is the environment's.
    assert found.defaults == ("--tensor-model-parallel-size 4",)
    assert found.ignored == ("--data-path",)


@pytest.mark.parametrize(
    ("lines", "launcher", "dp"),
    [
        ("#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=8", "srun python", 16),
        ("#SBATCH -N 4 --ntasks-per-node 8 -p batch", "srun python", 16),
        (
            "#SBATCH -N4 --ntasks-per-node=1 --gres=gpu:a100:4",
            "srun torchrun --nproc_per_node $SLURM_GPUS_ON_NODE",
            2,
        ),
        (
            "#SBATCH -N4 --ntasks-per-node=1 --gres=gpu:a100:4",
            "srun torchrun --nnodes=$SLURM_JOB_NUM_NODES --nproc_per_node=${SLURM_GPUS_ON_NODE:-8}",
            8,
        ),
        ("#SBATCH -N 4\n#SBATCH -n 32", "srun python", 16),
        ("#SBATCH --ntasks=32", "srun python", 16),
        # Behind the first command Slurm reads no lines; a script that is written here has its own.
        ("export A=1\n#SBATCH --nodes=4 --ntasks-per-node=8", "srun python", None),
        ("cat > b.sh <<A\n#!/bin/sh\n#SBATCH --nodes=4 --ntasks-per-node=8\nA", "srun python", 16),
        # srun has options of its own, which count more.
        ("#SBATCH --nodes=8\n#SBATCH --ntasks-per-node=8", "srun -N 4 -n 32 python", 16),
        ("#SBATCH --nodes=8\n#SBATCH --ntasks-per-node=8", "srun -N4 --ntasks=32 env A=1 python -u", 16),
        ("#SBATCH --nodes=4", "srun --ntasks-per-node=8 --gpus-per-node=8 python", 16),
        ("#SBATCH --nodes=8\n#SBATCH --ntasks-per-node=8", "srun --nodes=4 python", None),
        ("#SBATCH --nodes=8\n#SBATCH --ntasks-per-node=8", "srun -n $TASKS python", None),
        ("#SBATCH --nodes=8\n#SBATCH --ntasks-per-node=1", "srun -N 4 -n 4 torchrun --nproc-per-node=gpu", None),
        ("", "mpirun -np 16 -H a:8,b:8 python", 8),
        # What is given to sbatch is not in the script.
        ("#SBATCH --ntasks-per-node=8", "srun python", None),
        ("#SBATCH --nodes=2-4 --ntasks-per-node=8", "srun python", None),
        ("echo '#SBATCH --nodes=4 --ntasks-per-node=8'", "srun python", None),
    ],
)
def test_slurm_says_how_many_processes_there_are(lines: str, launcher: str, dp: int | None, tmp_path: Path) -> None:
    path = tmp_path / "a.sh"
    path.write_text(f"#!/bin/bash\n{lines}\n{launcher} pretrain_gpt.py --tensor-model-parallel-size 2\n")
    assert read_configuration(path).degrees.get("dp") == dp


@pytest.mark.parametrize(
    ("flags", "degrees"),
    [
        ("--model-parallel-size 2", {"tp": 2}),
        ("--moe-expert-parallel-size 4", {"ep": 4}),
        ("--activations-checkpoint-method uniform", {"recompute": "full"}),
        ("--recompute-activations --recompute-modules core_attn", {"recompute": "selective"}),
        # What a variable of the environment adds behind an argument without a value is not its value.
        ("--model-parallel-size 2 --sequence-parallel $MORE", {"tp": 2, "sequence_parallel": True}),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 6", {"recompute": "full"}),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 5", "recomputes some layers"),
        ("--recompute-granularity selective --recompute-modules core_attn mlp", "are not priced"),
        ("--use-distributed-optimizer --num-distributed-optimizer-instances 2", "among some of the replicas only"),
        ("--deepspeed --deepspeed_config ds.json", "give --zero-stage"),
    ],
)
def test_arguments_of_all_versions(flags: str, degrees: object, tmp_path: Path) -> None:
    path = tmp_path / "a.sh"
    path.write_text(f"torchrun pretrain_gpt.py --num-layers 6 {flags}")
    if isinstance(degrees, str):
        with pytest.raises(PlanError, match=degrees):
            read_configuration(path)
    else:
        assert read_configuration(path).degrees == degrees
