"""Batch scripts: options, shellcheck, and what the script does, with stand-ins for Slurm's programs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from mega_rl.cli.app import main
from mega_rl.disk import lock_file
from mega_rl.errors import RunError, UserError
from mega_rl.operations.schedulers import RecipeFacts, slurm
from mega_rl.operations.schedulers.slurm import SlurmRun, submit

ROOT = Path(__file__).parents[4]
SHELLCHECK = shutil.which("shellcheck", path=os.pathsep.join((str(ROOT / ".venv/linters/bin"), os.environ["PATH"])))
FACTS = RecipeFacts(
    recipe="quickstart", text="", overrides=["model.path=/models/$(id) it's"], run_dir="/runs/a", resume="auto",
    device="cuda", saves=True,
)  # fmt: skip
RUN = SlurmRun(nodes=4, nproc_per_node=8, venv=Path(sys.prefix))
IN_A_CONTAINER = replace(FACTS, recipe="/home/me/recipe.yaml")
EVERYTHING = SlurmRun(
    nodes=4,
    nproc_per_node=8,
    image="registry#team/mega_rl:0.1",
    mount=["/home/me", "/runs"],
    partition="gpu,long",
    account="team",
    time="1-12",
    cpus_per_node=64,
    env=["NCCL_DEBUG=it's $HOME", "HOME"],
    sbatch=["constraint=[rack1|rack2]", "contiguous", "gres=gpu:h100:8", "mem=900G"],
    max_restarts=2,
    warning_s=900,
)
SBATCH_ARGUMENTS = ["launch", "slurm", "quickstart", "--nodes=2", "--nproc-per-node=2", "checkpoint.resume=auto"]
# Stand-ins: srun writes its arguments and ends with $CODE (as a probe with $PROBE, but the first one with 0), scontrol
# writes what it requeues.
SRUN = """#!/bin/bash
if [[ "$*" == *--overlap* ]]; then
    [ -e probed ] || { touch probed; exit "${FIRST_PROBE:-0}"; }
    touch probed_again
    exit "${PROBE:-0}"
fi
printf '%s\\n' "$@" > arguments
echo "$MEGA_RL_LAUNCH_KEY" > key
tenths=$(seq "${TENTHS:-0}")  # before the trap: a signal in a substitution ends bash with a syntax error
trap 'touch got_usr1; exit 138' USR1
touch started
for _ in $tenths; do sleep 0.1; done
exit "$CODE"
"""
SCONTROL = """#!/bin/bash
[ -e probed_again ] && STATE=${LATER:-$STATE}
case "$1 $2" in
    'show hostnames') printf '%s\\n' gpu07 gpu08 ;;
    'show job') echo "JobId=17 JobState=${STATE:-RUNNING} PreemptTime=${PREEMPTED:-None} " ;;
    *) echo "$*" >> requeued ;;
esac
"""


def render(run: SlurmRun, facts: RecipeFacts = FACTS) -> str:
    return slurm.render(run, facts, folder="/home/me")


def directives(run: SlurmRun, facts: RecipeFacts = FACTS) -> dict[str, str]:
    return slurm.directives(run, facts, folder="/home/me")


def check(run: SlurmRun, facts: RecipeFacts = FACTS) -> list[str]:
    return slurm.check(run, facts, folder="/home/me")


def shellcheck(script: str) -> str:
    assert SHELLCHECK is not None
    program = [SHELLCHECK, "--shell=bash", "-"]
    return subprocess.run(program, input=script, capture_output=True, text=True, check=False).stdout


def start(folder: Path, run: SlurmRun = RUN, facts: RecipeFacts = FACTS, **variables: str) -> subprocess.Popen[str]:
    programs = folder / "bin"
    programs.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "scancel": "#!/bin/bash\necho $* >> cancelled\n"}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o700)
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "40017",
        "SLURM_JOB_NUM_NODES": "4",
        "SLURM_JOB_NODELIST": "gpu[07-08]",
        "CODE": "0",
    }
    return subprocess.Popen(
        ["bash", "-c", render(run, facts)],
        cwd=folder,
        env={**environment, **variables},
        text=True,
        stdout=subprocess.PIPE,
    )


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path.name} after 30 s"
        time.sleep(0.01)


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not there: make linters")
@pytest.mark.parametrize(
    "run", [RUN, EVERYTHING, replace(RUN, requeue=False)], ids=["plain", "everything", "no requeue"]
)
def test_shellcheck_finds_no_fault_in_the_script(run: SlurmRun) -> None:
    assert shellcheck(render(run)) == ""
    assert "SC2086" in shellcheck(
        render(run).replace('hostnames "$SLURM_JOB_NODELIST"', "hostnames $SLURM_JOB_NODELIST")
    )


def test_options_are_those_of_sbatch() -> None:
    head = [line for line in render(EVERYTHING, IN_A_CONTAINER).splitlines() if line.startswith("#SBATCH")]
    for line in (
        *("--nodes=4", "--partition=gpu,long", "--account=team", "--time=1-12", "--mem=900G", "--gres=gpu:h100:8"),
        *("--cpus-per-task=64", "--signal=B:USR1@900", "--requeue", "--contiguous", "--constraint=[rack1|rack2]"),
        *("--chdir=/home/me", "--output=%x-%j.out", "--open-mode=append"),
    ):
        assert f"#SBATCH {line}" in head
    assert not {"gpus-per-node", "exclusive"} & directives(EVERYTHING).keys()
    assert (directives(RUN)["gpus-per-node"], directives(RUN)["mem"], directives(RUN)["exclusive"]) == ("8", "0", "")
    assert "gpus-per-node" not in directives(RUN, replace(FACTS, device="cpu"))


def test_launcher_gets_settings_and_a_hidden_key(tmp_path: Path) -> None:
    process = start(tmp_path)
    assert process.wait(30) == 0
    arguments = (tmp_path / "arguments").read_text().splitlines()
    program = arguments[arguments.index("launcher") + 1 :]
    assert program[:5] == [f"{sys.prefix}/bin/python", "-P", "-m", "mega_rl.cli", "train"]
    options = dict(zip(program[5::2], program[6::2], strict=False))
    assert (options["--nnodes"], options["--nproc-per-node"], options["--config"]) == ("4", "8", "quickstart")
    assert program[-5:] == [FACTS.overrides[0], "--master-addr", "gpu07", "--master-port", "12017"]
    assert 'exec "$@" --node-rank "$SLURM_NODEID"' in arguments
    key = (tmp_path / "key").read_text().strip()
    assert len(key) == 64
    assert key not in render(RUN)
    assert not any(key in argument for argument in arguments)


PREEMPTED = "2026-01-01T00:00:00"
ENDS: list[tuple[dict[str, str], bool]] = [
    ({"CODE": "0"}, False),
    ({"CODE": "2"}, False),
    ({"CODE": "2", "PROBE": "1"}, False),
    ({"CODE": "138"}, True),
    ({"CODE": "138", "STATE": "CANCELLED"}, False),
    ({"CODE": "143"}, False),
    ({"CODE": "143", "PREEMPTED": PREEMPTED}, True),
    ({"CODE": "143", "PREEMPTED": PREEMPTED, "STATE": "COMPLETING"}, False),
    ({"CODE": "1"}, False),
    ({"CODE": "1", "PROBE": "1"}, True),
    ({"CODE": "1", "PROBE": "1", "FIRST_PROBE": "1"}, False),
    ({"CODE": "1", "PROBE": "1", "LATER": "COMPLETING"}, False),
    ({"CODE": "137"}, False),
    ({"CODE": "1", "STATE": "COMPLETING"}, False),
]


def test_only_jobs_that_can_continue_are_requeued(tmp_path: Path) -> None:
    folders = [tmp_path / str(case) for case in range(len(ENDS))]
    processes = []
    for folder, (variables, _) in zip(folders, ENDS, strict=True):
        folder.mkdir()
        processes.append(start(folder, **variables))
    for folder, process, (variables, requeued) in zip(folders, processes, ENDS, strict=True):
        assert process.wait(60) == int(variables["CODE"]), variables
        assert (folder / "requeued").exists() == requeued, variables
        assert not (folder / "probed_again").exists() or variables["CODE"] in ("1", "137", "143"), variables
        assert not (folder / "probed_again").exists() or "STATE" not in variables, variables
        assert not requeued or (folder / "requeued").read_text() == "requeue 40017\n"


def test_no_requeue_leaves_the_job_ended(tmp_path: Path) -> None:
    assert start(tmp_path, replace(RUN, requeue=False), CODE="138").wait(30) == 138
    assert not (tmp_path / "requeued").exists()
    assert not (tmp_path / "probed").exists()


def test_warning_is_passed_on_to_the_ranks(tmp_path: Path) -> None:
    process = start(tmp_path, CODE="7", TENTHS="300")
    wait_for(tmp_path / "started")
    process.send_signal(signal.SIGUSR1)
    assert process.wait(30) == 138
    assert (tmp_path / "got_usr1").exists()


def test_sigterm_reaches_the_steps_before_the_end(tmp_path: Path) -> None:
    process = start(tmp_path, CODE="3", TENTHS="2")
    wait_for(tmp_path / "started")
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 3
    assert (tmp_path / "cancelled").read_text() == "--signal=TERM 40017\n"


def test_restart_waits_for_the_lock(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    lock = tmp_path / "run" / "checkpoints" / ".lock"
    held = lock_file(lock)
    job = start(tmp_path, facts=replace(FACTS, run_dir=str(tmp_path / "run")), SLURM_RESTART_COUNT="1")
    time.sleep(0.5)  # longer than the job takes
    assert job.poll() is None
    os.close(held)
    assert job.wait(60) == 0


def test_variable_without_a_value_ends_the_job_as_a_mistake(tmp_path: Path) -> None:
    assert start(tmp_path, replace(RUN, env=["HOME"])).wait(30) == 2
    assert not (tmp_path / "started").exists()


def test_container_sees_recipe_and_run_folder() -> None:
    text = render(EVERYTHING, IN_A_CONTAINER)
    assert check(EVERYTHING, IN_A_CONTAINER) == []
    assert "--config /home/me/recipe.yaml" in text
    assert "--container-image=registry#team/mega_rl:0.1" in text
    assert "--container-mounts=/home/me:/home/me,/runs:/runs" in text
    assert "--container-workdir=/home/me" in text
    assert "--container-env=NCCL_DEBUG,HOME" in text
    assert "train=(mega-rl train" in text


@pytest.mark.parametrize(
    ("run", "changes", "message"),
    [
        (RUN, {"name": "my run"}, "--job-name='my run': has a blank"),
        (RUN, {"partition": "gpu\n#SBATCH --uid=0"}, "--partition="),
        (RUN, {"warning_s": 65_536}, "--warning-s=65536"),
        (RUN, {"sbatch": ["nodes=2"]}, "--sbatch=nodes: is not an option of sbatch that a run can have"),
        (RUN, {"sbatch": ["Nodes;"]}, "--sbatch=Nodes;: is not an option of sbatch that a run can have"),
        (RUN, {"mount": ["/a"]}, "--mount: has no effect without --image"),
        (EVERYTHING, {"mount": ["/home/me", "/run"]}, "trainer.run_dir=/runs/a: is lost with its container"),
        (EVERYTHING, {"mount": ["/runs"]}, "/home/me/recipe.yaml: is not seen in the container"),
        (EVERYTHING, {"mount": ["/home/me", "/runs", "/a:/b"]}, "--mount=/a:/b: is not an absolute path"),
    ],
)
def test_runs_that_cannot_work_are_refused(run: SlurmRun, changes: dict, message: str) -> None:
    facts = IN_A_CONTAINER if run.image else FACTS
    assert check(run, facts) == []
    (problem,) = check(replace(run, **changes), facts)
    assert message in problem


def test_command_prints_a_script(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "a secret")
    assert main([*SBATCH_ARGUMENTS, "--env=TOKEN", "--env=A=b c", "--sbatch=--constraint=h100"]) == 0
    text = capsys.readouterr().out
    assert f"train=({sys.executable} -P -m mega_rl.cli train" in text
    assert "#SBATCH --constraint=h100" in text
    assert f"#SBATCH --chdir={Path.cwd()}" in text
    assert "export A='b c'" in text
    assert "a secret" not in text
    assert "needed=(TOKEN)" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["checkpoint.resume=never"], "checkpoint.resume=never: a requeued job would begin anew"),
        (["--venv=/nowhere"], "--venv=/nowhere: has no bin/python"),
        (["--venv=/nowhere", "--image=a", "--mount=/runs", "trainer.run_dir=/runs/a"], "has no effect with --image"),
        (["--submit"], "sbatch: is not installed here"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main([*SBATCH_ARGUMENTS, *arguments]) == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
    assert message in line


def test_sbatch_gets_the_script_and_answers_the_job() -> None:
    def program(text: str) -> list[str]:
        return [sys.executable, "-c", text]

    assert submit("#!/bin/bash\n", program=program("print('17;cluster')")) == 17
    echo = program("import sys; sys.stderr.write('sbatch: error: ' + sys.stdin.read()); sys.exit(1)")
    with pytest.raises(UserError, match="has refused the job: the script"):
        submit("the script", program=echo)
    with pytest.raises(RunError, match="has not answered in 0 s"):
        submit("", program=program("import time; time.sleep(9)"), wait_s=0.2)
