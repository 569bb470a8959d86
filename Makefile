# make demo     set up, prepare the small model, run the quickstart
# make rlhf-demo  set up, then fine-tuning, a reward model and PPO against it; STRATEGY=megatron: on Megatron
# make test     set up, run all tests; make unit: those that start no engine; ARGS: what pytest is to run instead
# make setup    only the environment
# PIP_FLAGS     e.g. --extra-index-url https://download.pytorch.org/whl/cpu where plain torch is the CUDA build

SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS)
# PATH: the same ninja must build and later check DeepSpeed's operators, or it builds them again.
IN_VENV := PATH="$(abspath $(BIN)):$$PATH" TORCH_EXTENSIONS_DIR="$(abspath $(VENV)/torch_extensions)"
ON_CPU := DS_ACCELERATOR=cpu OMP_NUM_THREADS=1

.PHONY: setup demo rlhf-demo unit engines test

STRATEGY ?= deepspeed

setup:
	@$(MAKE) --no-print-directory -j3 $(VENV)/ready

$(VENV)/ready: $(VENV)/packages $(VENV)/op-CPUAdamBuilder $(VENV)/op-ShareMemCommBuilder
	touch $@

$(VENV)/deepspeed: setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt torch deepspeed
	touch $@

# SGLang's own requirements name CUDA builds, torchvision and triton are only imported on CPU: all without theirs.
$(VENV)/packages: $(VENV)/deepspeed
	$(PIP) -c constraints.txt -e '.[cpu,megatron,dev]'
	$(PIP) -c constraints.txt --no-deps sglang triton torchvision
	touch $@

# DeepSpeed compiles these at first use; here once, while the other packages install, so that the first run starts at
# once. They stay in this environment: another one would otherwise overwrite them in the shared cache.
$(VENV)/op-%: $(VENV)/deepspeed
	$(IN_VENV) $(ON_CPU) python -c 'from deepspeed.ops.op_builder import CPUAdamBuilder; from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder; $*().load(verbose=False)' > $@.log 2>&1 || { cat $@.log; exit 1; }
	touch $@

demo: setup
	$(IN_VENV) python -m rlhf_mp.quickstart
	$(IN_VENV) deepspeed --num_gpus 2 launch/train.py --config configs/quickstart.yaml

rlhf-demo: setup
	$(IN_VENV) $(ON_CPU) python -m rlhf_mp.rlhf_demo --out runs/rlhf_demo_$(STRATEGY) --strategy $(STRATEGY)

# Many tests wait for processes and deadlines, so more run at once than there are cores.
unit: setup
	$(IN_VENV) $(ON_CPU) python -m pytest -m "not engine and not long" -n 4 --dist worksteal

# A file at a time: its tests share what they start. Two, as a job of two ranks keeps two cores busy half of its time.
engines: setup
	$(IN_VENV) $(ON_CPU) python -m pytest -m "engine and not long" -n 2 --dist loadfile --durations=30

ifdef ARGS
test: setup
	$(IN_VENV) $(ON_CPU) python -m pytest $(ARGS)
else
test: unit engines
endif
