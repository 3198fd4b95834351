"""Commands of Slurm that start the tasks of one array as processes of this machine and know little else."""

from pathlib import Path

COMMANDS = {
    "sbatch": """
cp "$1" "$FAKE_SLURM/script"
for task in $(seq 0 "$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\)%.*/\\1/p' "$1")"); do
  export SLURM_JOB_ID=7$task SLURM_ARRAY_JOB_ID=7 SLURM_ARRAY_TASK_ID=$task SLURM_PROCID=0 SLURM_LOCALID=0
  setsid sh -c "bash '$1'; touch '$FAKE_SLURM/7_$task.ended'" >/dev/null 2>&1 </dev/null &
  echo $! >"$FAKE_SLURM/7_$task"
done
echo "Submitted batch job 7"
""",
    # --unbuffered --output FILE --error FILE COMMAND…
    "srun": """
of() { echo "$1" | sed "s/%A/7/; s/%a/$SLURM_ARRAY_TASK_ID/; s/%t/0/"; }
out=$(of "$3") && error=$(of "$5") && shift 5 && exec "$@" >>"$out" 2>>"$error"
""",
    "sacct": """
echo "JobID|State|NodeList"
for file in "$FAKE_SLURM"/7_?; do
  [ -e "$file.ended" ] && state=FAILED || state=RUNNING
  echo "$(basename "$file")|$state|here"
done
""",
    "scancel": """
echo "$@" >"$FAKE_SLURM/cancelled"
for file in "$FAKE_SLURM"/7_?; do kill -s KILL -- "-$(cat "$file")"; done 2>/dev/null
""",
}


def install(folder: Path) -> None:
    """Write the commands into a folder; ``FAKE_SLURM`` has to name it, and PATH to have it."""
    for name, lines in COMMANDS.items():
        (folder / name).write_text(f"#!/bin/sh{lines}")
        (folder / name).chmod(0o755)
