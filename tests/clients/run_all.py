"""Clients from PyPI against a real engine: `python tests/clients/run_all.py [NAME ...]`, or `make clients`.

Each client gets a virtual environment of its own in `.clients/`, and an engine of the bundled model serves them all.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

from checks import get

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parents[1] / ".clients"
CLIENTS = {
    "openai": ("openai_client.py", []),
    "open-webui": ("open_webui_calls.py", []),
    "litellm": ("litellm_client.py", ["litellm==1.110.2"]),
    "langchain": ("langchain_client.py", ["langchain-openai==1.7.4"]),
    "guidellm": ("guidellm_run.py", ["guidellm==0.8.1"]),
    "aider": ("aider_run.py", ["aider-chat==0.86.2"]),
    "aiperf": ("aiperf_run.py", ["aiperf==0.13.0"]),
    "vllm": ("vllm_bench.py", [
        "--no-deps", "vllm==0.20.0", "aiohappyeyeballs", "aiohttp", "aiosignal", "cachetools", "cbor2", "frozenlist",
        "gguf", "multidict", "openai-harmony", "pillow", "propcache", "pybase64", "yarl",
    ]),
}  # fmt: skip
"""Script and packages of each. The first two need the extra `dev` alone.

vLLM's client needs no kernels: torch and transformers are those of this environment.
"""


def python_of(name: str, packages: list[str]) -> str:
    """Return the Python of a client, which is installed once."""
    if not packages:
        return sys.executable
    folder = FOLDER / name
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        print(f"{name}: pip install {' '.join(packages)}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages]
        subprocess.run(pip, check=True)
        if "--no-deps" in packages:
            beside = next((folder / "lib").glob("python*/site-packages"))
            (beside / "beside.pth").write_text(sysconfig.get_path("purelib"))
        (folder / "installed").touch()
    return str(python)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def ready(url: str, engine: subprocess.Popen[bytes]) -> None:
    """Wait until the engine serves."""
    while engine.poll() is None:
        try:
            if get(url, "/ready")[0] == 200:
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"error: the engine has ended with {engine.returncode}")


def main() -> int:
    """Run the clients of the command line, or all. Exit code 1: one of them has failed."""
    names = sys.argv[1:] or list(CLIENTS)
    if unknown := set(names) - set(CLIENTS):
        raise SystemExit(f"error: no client {', '.join(sorted(unknown))}; there are {', '.join(CLIENTS)}")
    pythons = {name: python_of(name, CLIENTS[name][1]) for name in names}
    address = f"127.0.0.1:{free_port()}"
    words = ["serve", "tiny", "--name", f"clients-{os.getpid()}", "--http", address, "--set", "http.processes=2"]
    engine = subprocess.Popen([sys.executable, "-m", "ppconsole", *words], start_new_session=True)
    failed = []
    try:
        ready(f"http://{address}", engine)
        for name in names:
            # Its own modules alone, and no look at a network for prices or tokenizers.
            env = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""}
            if subprocess.run([pythons[name], str(HERE / CLIENTS[name][0]), f"http://{address}"], env=env).returncode:
                failed.append(name)
    finally:
        engine.send_signal(signal.SIGTERM)
        engine.wait(30)
    print(f"failed: {', '.join(failed)}" if failed else f"{len(names)} clients passed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
