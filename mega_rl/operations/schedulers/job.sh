#!/bin/bash
# shellcheck disable=SC2016  # settings and --node-rank are not for this shell to expand
# mega_rl on @NODES@ node(s), @RANKS@ rank(s) on each; start it with: sbatch THIS_FILE
# End the step in progress, save and requeue:     scancel --batch --signal=USR1 JOB
# End the step in progress, save and do not:      scancel --signal=TERM JOB
@DIRECTIVES@
set -u

# Launchers know one another by this key. Each start makes a new one; srun hands it to its tasks in their environment.
MEGA_RL_LAUNCH_KEY=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export MEGA_RL_LAUNCH_KEY
@EXPORTS@
needed=(@NEEDED@)
for name in "${needed[@]}"; do
    if [ -z "${!name+set}" ]; then
        echo "error: --env=$name: has no value where this job was submitted" >&2
        exit 2
    fi
done

requeue=@REQUEUE@
# Ranks of a lost node may still hold the run folder; after five minutes the run names the holder.
lock=@LOCK@
if [ "$requeue" = yes ] && [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && [ -f "$lock" ]; then
    flock --wait 300 "$lock" true
fi

train=(@TRAIN@)
step=(@STEP@)

nodes_answer() {
    timeout 300 srun --overlap --mpi=none --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" \
        --ntasks-per-node=1 true
}

answered=no  # if they do not answer now, silence later proves no loss
[ "$requeue" = yes ] && nodes_answer && answered=yes

address=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((12000 + SLURM_JOB_ID % 20000))
train+=(--master-addr "$address" --master-port "$port")

# Each task adds its number.
srun "${step[@]}" sh -c 'exec "$@" --node-rank "$SLURM_NODEID"' launcher "${train[@]}" &
srun=$!

# Slurm warns only this script, and srun passes it on. When scancel or a requeue ends the job, the tasks get SIGTERM
# themselves; a SIGTERM to only this script is passed on.
trap 'signalled=yes; kill -s USR1 "$srun" 2>/dev/null' USR1
trap 'signalled=yes; scancel --signal=TERM "$SLURM_JOB_ID" 2>/dev/null' TERM
while true; do
    signalled=no
    wait "$srun"
    code=$?
    [ "$signalled" = no ] && break  # else the code may be of the wait
done
trap '' USR1
trap - TERM

# A job that was cancelled or requeued is not running any more.
is_running() {
    local wait_s
    for wait_s in 0 10 20 30; do  # for a controller that does not answer
        sleep "$wait_s"
        state=$(scontrol show job --oneliner "$SLURM_JOB_ID") && break
    done
    [[ " $state " == *' JobState=RUNNING '* ]]
}

reason=''
if [ "$requeue" = yes ] && [ "$code" != 0 ] && [ "$code" != 2 ] && is_running; then
    if [ "$code" = 138 ]; then
        reason='saved before the time limit'
    elif [ "$code" = 143 ] && [[ $state =~ \ PreemptTime=[0-9] ]]; then
        reason='saved before preemption'
    elif [ "$answered" = yes ] && ! nodes_answer; then
        reason='a node is lost'
    fi
fi
if [ -n "$reason" ] && is_running; then
    echo "mega-rl: $reason (exit code $code); the job is requeued and resumes from its newest checkpoint"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
