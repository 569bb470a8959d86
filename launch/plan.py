"""What does a run need, and does it fit? No GPU is used, nothing is started.

What a configuration needs, phase by phase, on the cards of this machine or on others:

  python launch/plan.py --config configs/grpo_qwen2.5_7b_deepspeed.yaml --gpu h100
  python launch/plan.py --config configs/quickstart.yaml actor_rollout_ref.rollout.n=16 --explain

Which layouts a model fits, the fastest first, and why the others do not:

  python launch/plan.py --model qwen2.5-32b --gpu h100 --num-gpus 16 --algorithm grpo --price-per-gpu-hour 2.5

What fits a card, and what a model needs, for full training, LoRA and QLoRA:

  python launch/plan.py --what-fits 24GB
  python launch/plan.py --what-needs llama-2-13b --cloud

GB are 10^9 bytes, GiB 2^30. Exit code 1: it does not fit; 2: the question has problems; all of them are printed.
"""

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

from rlhf_mp.errors import ConfigError
from rlhf_mp.planner.amount import parse_size
from rlhf_mp.planner.capacity import describe_fits, describe_needs, what_fits, what_needs
from rlhf_mp.planner.drawing import draw
from rlhf_mp.planner.hardware import find_gpu
from rlhf_mp.planner.instances import describe_instances
from rlhf_mp.planner.job import OPTIMIZER_MOMENTS, Workload
from rlhf_mp.planner.known_models import find_model
from rlhf_mp.planner.report import as_json, describe, explain
from rlhf_mp.planner.search import Question, search
from rlhf_mp.planner.search_report import describe_search, search_json

FITS, DOES_NOT_FIT, BAD_QUESTION = 0, 1, 2


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", type=Path, help="a run's YAML file, with key=value words to change it")
    what.add_argument("--model", help="a known model's name, or the path of a config.json")
    what.add_argument("--what-fits", type=parse_size, metavar="SIZE", help="what trains on a card of 24GB or 24GiB")
    what.add_argument("--what-needs", metavar="MODEL", help="what it takes to train this model")
    parser.add_argument("--gpu", help="e.g. rtx4090, a100-40g, h100; with --config, unset: this machine's")
    parser.add_argument("--num-gpus", type=int, default=8, help="with --model")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="with --model")
    parser.add_argument("--algorithm", choices=("sft", "grpo", "ppo"), default="grpo", help="with --model")
    parser.add_argument("--backend", choices=("deepspeed", "megatron"), help="with --model; unset: both")
    parser.add_argument("--tp", type=int, help="Megatron's tensor parallelism, with --model; unset: tried")
    parser.add_argument("--pp", type=int, help="Megatron's pipeline parallelism, with --model; unset: tried")
    parser.add_argument("--rollout-tp", type=int, help="GPUs an engine, with --model; unset: tried")
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZER_MOMENTS), default="adamw", help="with --model")
    parser.add_argument("--reward-model", metavar="MODEL", help="a model that scores responses, with --model")
    parser.add_argument("--network-gbit", type=float, default=200.0, help="a second and GPU between machines")
    parser.add_argument("--price-per-gpu-hour", type=float, metavar="PRICE", help="with --model: what a step costs")
    parser.add_argument("--cloud", action="store_true", help="with --what-needs: the clouds' smallest machines")
    parser.add_argument("--sleep", action="store_true", help="with --model: engines give memory back between rollouts")
    parser.add_argument("--prompts", type=int, default=512, help="a step, with --model")
    parser.add_argument("--responses", type=int, default=8, help="a prompt, with --model")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="with --model")
    parser.add_argument("--response-tokens", type=int, default=1024, help="with --model")
    parser.add_argument("--host-memory", type=parse_size, metavar="SIZE", help="of each machine; unset: not judged")
    parser.add_argument("--json", action="store_true", help="sizes in bytes")
    parser.add_argument("--explain", action="store_true", help="every term with its formula and its numbers")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="stacked bars a phase, .png or .svg")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="with --config")
    return parser.parse_intermixed_args(argv)


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    try:
        if args.config:
            return show_plan(args)
        if args.model:
            return show_search(args)
        if args.what_fits:
            return show_fits(args)
        return show_needs(args)
    except ConfigError as error:
        print(error, file=sys.stderr)
    except ValueError as error:  # a plot that cannot be drawn
        print(error, file=sys.stderr)
    return BAD_QUESTION


def show_plan(args: argparse.Namespace) -> int:
    from rlhf_mp.config.load import load_config  # needs omegaconf; the other questions need only Python
    from rlhf_mp.planner.disk import describe_disk, disk_plan
    from rlhf_mp.planner.preflight import plan_of, this_machine

    config = load_config(args.config, args.overrides)
    machine = this_machine(config)
    if args.gpu:
        machine = replace(machine, gpu=find_gpu(args.gpu), host_memory=args.host_memory)
    elif args.host_memory:
        machine = replace(machine, host_memory=args.host_memory)
    plan = plan_of(config, machine)
    if args.json:
        print(json.dumps(as_json(plan) | {"disk": asdict(disk_plan(config, plan.job))}, indent=2))
    else:
        print(explain(plan) if args.explain else describe(plan))
        print(describe_disk(config, plan.job))
    if args.plot:
        draw(plan, args.plot)
    return FITS if plan.fits else DOES_NOT_FIT


def show_search(args: argparse.Namespace) -> int:
    question = Question(
        model=find_model(args.model),
        gpu=find_gpu(args.gpu or "h100"),
        num_gpus=args.num_gpus,
        algorithm=args.algorithm,
        workload=Workload(args.prompts, args.responses, args.prompt_tokens, args.response_tokens),
        gpus_per_node=args.gpus_per_node,
        backends=(args.backend,) if args.backend else ("deepspeed", "megatron"),
        host_memory=args.host_memory,
        engines_sleep=args.sleep,
        tp=args.tp,
        pp=args.pp,
        rollout_tp=args.rollout_tp,
        optimizer=args.optimizer,
        network_rate=args.network_gbit * 1e9 / 8,
        reward_model=find_model(args.reward_model) if args.reward_model else None,
        price=args.price_per_gpu_hour,
    )
    found, refused = search(question)
    if args.json:
        print(json.dumps(search_json(question, found, refused), indent=2))
    else:
        print(describe_search(question, found, refused))
        if found and args.explain:
            print("\n" + explain(found[0].plan))
    if args.plot and found:
        draw(found[0].plan, args.plot)
    return FITS if found else DOES_NOT_FIT


def show_fits(args: argparse.Namespace) -> int:
    if args.json:
        fits = what_fits(args.what_fits)
        print(json.dumps({method: [as_json(plan) for plan in plans] for method, plans in fits.items()}, indent=2))
    else:
        print(describe_fits(args.what_fits))
    return FITS


def show_needs(args: argparse.Namespace) -> int:
    shape = find_model(args.what_needs)
    if args.json:
        needs = {need.method: {"num_gpus": need.num_gpus, "peak_bytes": need.plan.peak} for need in what_needs(shape)}
        print(json.dumps(needs, indent=2))
    else:
        print(describe_needs(shape))
        if args.cloud:
            print("\n" + describe_instances(shape))
    return FITS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
