# What a job needs on your cluster. Read by submit.py, by train.sbatch and, on every node, by node.sh.
# Edit it, or keep a copy elsewhere and name that in RLHF_MP_ENV.

# Account and queue, for submit.py; with a bare sbatch give them on its command line.
# export SBATCH_ACCOUNT=my_project SBATCH_PARTITION=gpu

# The environment: modules, conda or a virtual environment. A container brings its own.
# module load cuda/12.8 gcc/12
if [ -f .venv/bin/activate ]; then source .venv/bin/activate; fi

# Options of every srun. Containers (pyxis): --container-image=/images/rlhf_mp.sqsh --container-mounts=$PWD,/data
SRUN_OPTIONS=()

# A prefix of every command on a node. Apptainer: (apptainer exec --nv --bind "$PWD" /images/rlhf_mp.sif)
NODE_PREFIX=()

# How often a job may requeue itself: at the time limit, when pre-empted, when a node is lost.
MAX_RESTARTS=20

# Networks. The first node's name decides the one that Ray, Gloo and the engines use; give another address of that node
# to choose another: export MASTER_ADDR=$(hostname)-ib0. NCCL finds InfiniBand by itself; without it, name the interface:
# export NCCL_SOCKET_IFNAME=eth0 NCCL_DEBUG=WARN
