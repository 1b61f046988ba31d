"""`mega-rl launch`."""

from __future__ import annotations

from mega_rl.cli.help import Commands
from mega_rl.cli.launch import kubernetes, ray, slurm

app = Commands(name="launch", help="Runs on several nodes, by the scheduler of a cluster.")
app.command("ray")(ray.ray)
app.command("kubernetes")(kubernetes.kubernetes)
app.command("slurm")(slurm.slurm)
