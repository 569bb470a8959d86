#!/bin/bash
# What a job's steps run in every task: the cluster's environment, then the given Python script. A task lasts until the
# guard of its rank has cleaned up: Slurm ends whatever a finished step leaves, the guard included.
set -o pipefail
source "$RLHF_MP_ENV" || { echo "$(hostname): RLHF_MP_ENV=$RLHF_MP_ENV could not be read" >&2; exit 2; }
"${NODE_PREFIX[@]}" python -c '' 2>/dev/null || {
    echo "$(hostname): python does not start; activate an environment in $RLHF_MP_ENV" >&2
    exit 2
}
trap : TERM # the rank gets it too; wait for its guard
"${NODE_PREFIX[@]}" python -u "$@" | (trap '' TERM; exec cat) # the guard holds the pipe
rc=$?
# The first to fail decides: srun would return the highest code of all, that of those it ended.
if ((rc)) && [ "${RLHF_MP_FIRST_EXIT:-}" ]; then
    (set -o noclobber; echo "$rc task $SLURM_PROCID on $(hostname)" >"$RLHF_MP_FIRST_EXIT") 2>/dev/null
fi
exit $rc
