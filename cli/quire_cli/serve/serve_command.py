"""The command ``quire serve``: finds the model, starts the tree of processes, and says how to use it."""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic, time
from typing import NoReturn

from quire_engine.checkpoint.config import config_path, read_config_json
from quire_engine.checkpoint.support import check_max_model_len, plain_max_length
from quire_engine.config import OTHER_VARIABLES, EngineConfig
from quire_engine.errors import ModelError
from quire_engine.kernels.build import needs_build
from quire_proto.cli import read_settings, reject_unknown_env
from quire_proto.terminal import fail, has_color
from quire_router.config import Settings

from quire_cli.machine.gpus import visible_gpus
from quire_cli.machine.memory import memory_shortage, weight_bytes
from quire_cli.machine.running import RunningServer, registered, start_ticks
from quire_cli.model.check import MemoryNeed
from quire_cli.model.find import FoundModel, find_model
from quire_cli.model.name import ModelNotFoundError
from quire_cli.serve.flags import ServeFlags, read_flags
from quire_cli.serve.log import say, show_status
from quire_cli.serve.plan import Plan, make_plan, reachable
from quire_cli.serve.ports import PortError, Ports
from quire_cli.serve.process_tree import ProcessTree, answers
from quire_cli.serve.ready_message import how_to_try, summary, url_of
from quire_cli.serve.start_progress import StartProgress


def serve(arguments: Sequence[str]) -> NoReturn:
    """Serves until a signal comes. Exits with 2 for wrong settings, and with 1 and one sentence if it cannot start."""
    flags = read_flags(arguments)
    reject_unknown_env(EngineConfig, OTHER_VARIABLES)  # once, rather than each process of the tree for itself
    reject_unknown_env(Settings)
    found = find(flags)
    flags = replace(flags, names=flags.names or [found.name])
    ports = Ports(say)  # holds its claims until the end
    try:
        plan = make_plan(flags, found.path, ports, visible_gpus())
    except (PortError, ModelError, ValueError) as error:
        fail(str(error))
    except OSError as error:  # there may be no folder of the user's, as in some containers
        advice = "name a --journal-file, or --no-journal."
        fail(f"{error.filename} cannot hold the journal: {error.strerror}; {advice}")
    check_host_memory(plan)
    with registered(describe_server(plan, flags.model)):
        raise SystemExit(asyncio.run(_run(plan)))


def find(flags: ServeFlags) -> FoundModel:
    """The folder or GGUF file that is served, downloaded if need be. Ends the process with one sentence if there is
    none, or if it cannot be served.
    """
    config = read_settings(EngineConfig, [f"--model={flags.model}", *flags.engine])
    # Experts, which most weights are of, are in memory once where engines share them.
    engines = 1 if flags.data_parallel_size > 1 else flags.engines
    need = MemoryNeed(engines, config.dtype, config.quantization) if is_on_host(config) else None
    try:
        found = find_model(flags.model, need)
        if config.max_model_len:
            check_length(found.path, config.max_model_len)
        return found
    except (ModelNotFoundError, ModelError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def is_on_host(config: EngineConfig) -> bool:
    """Whether engines of ``config`` will hold the model in this machine's own memory."""
    return config.device == "cpu" or not visible_gpus()


def describe_server(plan: Plan, source: str) -> RunningServer:
    """What other commands learn of this process, which serves what was typed as ``source``."""
    pid, settings = os.getpid(), plan.settings
    return RunningServer(
        pid=pid,
        ticks=start_ticks(pid) or 0,
        since=round(time(), 3),
        url=url_of(plan),
        model=plan.name,
        source=source,
        engines=plan.engines,
        device="cpu" if is_on_host(plan.engine) else "cuda",
        host=reachable(settings.host),
        metrics_port=settings.metrics_port,
    )


def check_length(model: Path, asked: int) -> None:
    """Raises ``ModelError`` where ``--max-model-len`` asks for more than the model has. What only transformers can tell
    of a model is left to the engine.
    """
    if length := plain_max_length(config_path(model), read_config_json(model)):
        check_max_model_len(asked, length)


def check_host_memory(plan: Plan) -> None:
    """Ends the process with one sentence if the weights cannot fit into the host's memory. What a GPU holds is left to
    the engine, which measures it.
    """
    config = plan.engine
    if not is_on_host(config):
        return
    weights = weight_bytes(plan.model, config.dtype, config.quantization)
    engines = 1 if config.data_parallel_size > 1 else plan.engines
    if sentence := memory_shortage(plan.name, weights, engines, config.quantization):
        fail(sentence)


async def _run(plan: Plan) -> int:
    changed = asyncio.Event()
    progress = StartProgress([each.name for each in plan.programs if each.kind == "engine"], show_status)
    tree = ProcessTree(plan.programs, say, changed.set, progress.report)
    loop, interrupts = asyncio.get_running_loop(), 0

    def stop(number: int) -> None:
        nonlocal interrupts
        interrupts += number == signal.SIGINT
        if interrupts > 1:  # somebody does not want to wait; a closed terminal sends its signals twice by itself
            tree.kill()
        elif not tree.is_stopping:
            seconds = plan.settings.shutdown_timeout
            say(f"stopping; running requests have {seconds:g} s, and a second Ctrl-C ends all at once")
        tree.stop(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        loop.add_signal_handler(number, stop, number)
    async with asyncio.TaskGroup() as tasks:
        announcing = tasks.create_task(_announce(plan, tree, changed, progress.facts))
        watching = tasks.create_task(progress.run(tree.ready)) if has_color(sys.stdout) else None
        announcing.add_done_callback(lambda _: watching and watching.cancel())
        try:
            status = await tree.run()
        finally:
            announcing.cancel()
            say("stopped")
    return status


async def _announce(
    plan: Plan, tree: ProcessTree, changed: asyncio.Event, facts: Mapping[str, Mapping[str, object]]
) -> None:
    """Prints how far the start is, then what is served, and how to try it. ``facts`` are what engines say of them."""
    began, last = monotonic(), -1
    if is_on_host(plan.engine) and needs_build():
        say("this first time, the engine compiles its kernels, which takes 15 seconds to a minute; requests wait")
    while True:
        ready = len([name for name in tree.ready if name != "router"])
        if ready != last and ready:
            say(f"{ready} of {plan.engines} engines ready after {monotonic() - began:.1f} s")
            last = ready
        if ready == plan.engines and "router" in tree.ready:
            break
        changed.clear()
        await changed.wait()
    host = reachable(plan.settings.host)
    await answers(plan.settings.metrics_port, "/health", host)  # the router has found its engines
    for line in summary(plan, next(iter(facts.values()), {})):
        say(line)
    say(how_to_try(plan))
