"""Policies that choose k, and the one place that makes them from user input or from saved state."""

import inspect
import os
from collections.abc import Mapping
from typing import Any

from stepgraph.capture.policies.bandit import BanditPolicy
from stepgraph.capture.policies.base import KPolicy
from stepgraph.capture.policies.fixed import FixedPolicy
from stepgraph.capture.policies.goodput import GoodputPolicy
from stepgraph.capture.policies.ladder import LadderPolicy
from stepgraph.capture.policies.scheduled import DEFAULT_HOLD_STEPS, SchedulePolicy
from stepgraph.capture.schedule import DEFAULT_MAX_K, Schedule, show

__all__ = [
    "ADAPTIVE",
    "BanditPolicy",
    "FixedPolicy",
    "GoodputPolicy",
    "KPolicy",
    "LadderPolicy",
    "SchedulePolicy",
    "make_adaptive",
    "make_policy",
    "policy_from_dict",
]

# Policies that learn while they run, by kind.
ADAPTIVE = {policy.kind: policy for policy in (LadderPolicy, GoodputPolicy, BanditPolicy)}


def make_policy(
    k: int | None = None,
    schedule: Schedule | str | os.PathLike[str] | list | dict | None = None,
    *,
    max_k: int = DEFAULT_MAX_K,
    hold_steps: int = DEFAULT_HOLD_STEPS,
) -> KPolicy:
    """The policy for either a fixed k or a schedule.

    Args:
        k: draft tokens of every step, 0..max_k.
        schedule: a `Schedule`, JSON text, a path, `[[first, last, k], …]` or a `speculative_config` object.
        max_k: largest k allowed.
        hold_steps: hysteresis of the schedule, in steps (see `SchedulePolicy`).

    Raises:
        ValueError: both or neither given, or either is malformed (`ScheduleError` for schedules).
    """
    if k is not None and schedule is not None:
        raise ValueError("k and schedule were both given; give one of them.")
    if schedule is not None:
        read = Schedule.load if isinstance(schedule, str | os.PathLike) else Schedule.parse
        return SchedulePolicy(read(schedule, max_k), hold_steps)
    if k is None:
        raise ValueError("neither k nor a schedule was given; give one of them.")
    return FixedPolicy(k, max_k)


def make_adaptive(kind: str, options: Mapping[str, Any] | None = None) -> KPolicy:
    """A policy that learns.

    Args:
        kind: one of `ADAPTIVE`.
        options: arguments of its class by name; `goodput` and `bandit` need `cost`, the path of a profile.

    Raises:
        ValueError: unknown kind or option, a missing option, or a value that cannot be.
    """
    if kind not in ADAPTIVE:
        raise ValueError(f"policy is {show(kind)}; it must be one of {', '.join(ADAPTIVE)}.")
    options = {} if options is None else options
    if not isinstance(options, Mapping):
        raise ValueError(f"the options of the policy are {show(options)}; they must be an object of names and values.")
    parameters = inspect.signature(ADAPTIVE[kind]).parameters
    if unknown := sorted(set(options) - set(parameters)):
        raise ValueError(f"policy {kind} has no option {show(unknown[0])}; it has {', '.join(parameters)}.")
    needed = [name for name, parameter in parameters.items() if parameter.default is parameter.empty and name not in options]
    if needed:
        raise ValueError(f"policy {kind} needs the option {needed[0]!r}; stepgraph profile writes a file for it.")
    return ADAPTIVE[kind](**options)


def policy_from_dict(data: dict[str, Any]) -> KPolicy:
    """The policy, with its state, that `KPolicy.to_dict` described."""
    policies = {policy.kind: policy for policy in (FixedPolicy, SchedulePolicy)} | ADAPTIVE
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in policies:
        raise ValueError(f"the saved policy's kind is {show(kind)}; it must be one of {', '.join(sorted(policies))}.")
    try:
        return policies[kind].from_dict(data)
    except KeyError as error:
        raise ValueError(f"the saved {kind} policy has no {error} entry.") from None
    except TypeError as error:
        raise ValueError(f"the saved {kind} policy cannot be read: {error}.") from None
