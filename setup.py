"""Packaging. ``make setup`` is the tested way to install; see README.md."""

from pathlib import Path

from setuptools import find_packages, setup

CORE = [
    "accelerate",  # transformers reads a model into ZeRO-3 only with it
    "deepspeed",
    "jaxtyping",
    "math-verify",
    "ninja",
    "numpy",
    "omegaconf>=2.4",
    "peft",
    "psutil",
    "pyarrow",
    "pyyaml",
    "ray",
    "requests",
    "aiohttp",
    "safetensors",
    "tensorboard",
    "tokenizers",
    "torch",
    "tqdm",
    "transformers",
    "datasets",
]
# What the SGLang server imports on a CPU machine. SGLang itself, triton and torchvision are installed by
# ``make setup`` with --no-deps: their own requirements ask for CUDA builds.
SGLANG_ON_CPU = [
    "apache-tvm-ffi",
    "compressed-tensors",
    "dill",
    "einops",
    "fastapi",
    "gguf",
    "ipython",
    "msgspec",
    "openai",
    "orjson",
    "packaging",
    "partial-json-parser",
    "pillow",
    "pybase64",
    "python-multipart",
    "pyzmq",
    "sentencepiece",
    "setproctitle",
    "soundfile",
    "uvicorn",
    "uvloop",
    "xgrammar",
]

setup(
    name="rlhf_mp",
    version="0.1.0",
    description="RLHF for clusters with tight memory: DeepSpeed ZeRO-3 trains, SGLang samples, Ray swaps the weights",
    long_description=Path(__file__).with_name("README.md").read_text(),
    long_description_content_type="text/markdown",
    packages=find_packages(include=["rlhf_mp", "rlhf_mp.*"]),
    python_requires=">=3.11,<3.13",
    install_requires=CORE,
    extras_require={
        "cpu": SGLANG_ON_CPU,
        "megatron": ["megatron-core", "mbridge", "psutil"],  # without psutil saving a checkpoint hangs
        "gpu": ["sglang==0.5.15.post1"],
        "qlora": ["bitsandbytes"],
        "dev": [
            "bitsandbytes",
            "ruff",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "hypothesis",
            "jaxtyping",
            "beartype",
        ],
    },
    # SGLang loads these in every worker process: it is how a swap is verified inside the engine.
    entry_points={"sglang.srt.plugins": ["rlhf_mp = rlhf_mp.rollout.sglang_plugin:install"]},
)
