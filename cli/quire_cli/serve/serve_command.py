"""The command ``quire serve``: finds the model, starts the tree of processes, and says how to use it."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import NoReturn

from quire_engine.config import EngineConfig
from quire_engine.errors import ModelError
from quire_proto.cli import join_host_port, read_settings

from quire_cli.machine.gpus import count_gpus
from quire_cli.machine.memory import memory_shortage, weight_bytes
from quire_cli.model.check import MemoryNeed
from quire_cli.model.find import FoundModel, find_model
from quire_cli.model.name import ModelNotFoundError
from quire_cli.serve.flags import ServeFlags, read_flags
from quire_cli.serve.log import say
from quire_cli.serve.plan import Plan, make_plan, reachable
from quire_cli.serve.ports import PortError, Ports
from quire_cli.serve.process_tree import ProcessTree, answers

DEFAULT_PORT = 8000
SLOW_START = 6.0  # seconds after which a start is worth an explanation


def serve(arguments: Sequence[str]) -> NoReturn:
    """Serves until a signal comes. Exits with 2 for wrong settings, and with 1 and one sentence if it cannot start."""
    flags = read_flags(arguments)
    found = find(flags)
    flags = replace(flags, names=flags.names or [found.name])
    ports = Ports(say)  # holds its claims until the end
    try:
        plan = make_plan(flags, found.path, ports, count_gpus())
    except (PortError, ModelError, ValueError) as error:
        _quit(str(error))
    except OSError as error:  # there may be no folder of the user's, as in some containers
        _quit(f"{error.filename} cannot hold the journal: {error.strerror}; name a --journal-file, or --no-journal.")
    check_memory(plan)
    raise SystemExit(asyncio.run(_run(plan)))


def find(flags: ServeFlags) -> FoundModel:
    """The folder or GGUF file that is served, downloaded if need be. Ends the process with one sentence if there is
    none, or if it cannot be served.
    """
    config = read_settings(EngineConfig, [f"--model={flags.model}", *flags.engine])
    in_memory = config.device == "cpu" or not count_gpus()
    need = MemoryNeed(flags.engines, config.dtype, config.quantization) if in_memory else None
    try:
        return find_model(flags.model, need)
    except ModelNotFoundError as error:
        _quit(str(error))
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def check_memory(plan: Plan) -> None:
    """Ends the process with one sentence if the weights cannot fit into the host's memory. What a GPU holds is left to
    the engine, which measures it.
    """
    config = plan.engine
    if config.device != "cpu" and count_gpus():
        return
    weights = weight_bytes(plan.model, config.dtype, config.quantization)
    if sentence := memory_shortage(plan.name, weights, plan.engines, config.quantization):
        _quit(sentence)


async def _run(plan: Plan) -> int:
    changed = asyncio.Event()
    tree = ProcessTree(plan.programs, say, changed.set)
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
        announcing = tasks.create_task(_announce(plan, tree, changed))
        try:
            status = await tree.run()
        finally:
            announcing.cancel()
            say("stopped")
    return status


async def _announce(plan: Plan, tree: ProcessTree, changed: asyncio.Event) -> None:
    """Prints how far the start is, then how to try it."""
    began, last = monotonic(), -1
    explain = asyncio.get_running_loop().call_later(
        SLOW_START, say, "the first time, engines build their kernels, which takes 15 seconds to a minute"
    )
    while True:
        ready = len([name for name in tree.ready if name != "router"])
        if ready != last and ready:
            say(f"{ready} of {plan.engines} engines ready after {monotonic() - began:.1f} s")
            last = ready
        if ready == plan.engines and "router" in tree.ready:
            break
        changed.clear()
        await changed.wait()
    explain.cancel()
    host = reachable(plan.settings.host)
    await answers(plan.settings.metrics_port, "/health", host)  # the router has found its engines
    say(how_to_try(plan))


def how_to_try(plan: Plan) -> str:
    """Commands that ask for an answer."""
    url = url_of(plan)
    body: dict[str, object] = {"model": plan.name, "stream": True}
    where = "" if plan.settings.http_port == DEFAULT_PORT else f" --url {url}"
    if has_template(plan.tokenizer):
        route, command = "chat/completions", f"quire chat{where}"
        body["messages"] = [{"role": "user", "content": "What is 7 plus 5?"}]
    else:
        route, command = "completions", f"quire complete{where} 'Once upon a time'"
        body |= {"prompt": "Once upon a time", "max_tokens": 64}
    key = f'    -H "Authorization: Bearer {_variable_of_key()}" \\\n' if os.environ.get("QUIRE_ROUTER_API_KEY") else ""
    return (
        f"ready: {plan.name} on {url} (gRPC on {plan.settings.grpc_port}); Ctrl-C stops it. Try\n\n"
        f"  {command}\n\n"
        f"  curl -N {url}/v1/{route} \\\n"
        f"    -H 'Content-Type: application/json' \\\n{key}"
        f"    -d '{json.dumps(body)}'\n"
    )


def url_of(plan: Plan) -> str:
    """Where clients on this machine find the REST API."""
    return f"http://{join_host_port(reachable(plan.settings.host), plan.settings.http_port)}"


def has_template(folder: Path) -> bool:
    """Whether the model whose tokenizer is in ``folder`` can chat."""
    if (folder / "chat_template.jinja").is_file():
        return True
    path = folder / "tokenizer_config.json"
    try:
        return "chat_template" in json.loads(path.read_text())
    except (OSError, ValueError):
        return False


def _variable_of_key() -> str:
    """A shell expression for the first of the keys, so that the key itself is not printed."""
    several = "," in os.environ["QUIRE_ROUTER_API_KEY"]
    return "${QUIRE_ROUTER_API_KEY%%,*}" if several else "$QUIRE_ROUTER_API_KEY"


def _quit(sentence: str) -> NoReturn:
    sys.stderr.write(f"quire: {sentence}\n")
    raise SystemExit(1)
