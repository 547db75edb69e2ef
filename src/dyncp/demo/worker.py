"""The training processes of the demo: `torchrun`, and what it starts for each rank."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Generator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args
from torch.distributed.run import run as run_torchrun
from tqdm import tqdm

from dyncp.demo.config import DemoConfig
from dyncp.demo.data import DocumentMasks, TextFiles
from dyncp.demo.model import ModelSize
from dyncp.demo.traffic import rank_load
from dyncp.demo.train import Trainer
from dyncp.ir.plan import RankPlan
from dyncp.ir.shape import AttentionShape
from dyncp.lookahead.config import Batching, LookAhead, Planning
from dyncp.lookahead.loader import DynamicLoader
from dyncp.lookahead.local_batch import LocalBatch
from dyncp.lookahead.stores.tcp import TcpStore
from dyncp.lookahead.workers import interpreter_command
from dyncp.runtime.attention import attention

TIMEOUT_S = 120.0
# in the folder through which the demo and its training processes talk
CONFIG_FILE, DOCUMENTS_FILE = "config.json", "documents.json"
RESULT_FILE, FAILURE_FILE, EXITS_FILE = "rank-{rank}.json", "failure-{rank}.json", "exits.json"


def attention_shape(size: ModelSize) -> AttentionShape:
    """The model's attention layers as the planner sees them."""
    return AttentionShape(size.q_heads, size.kv_heads, size.head_dim, dtype="float32")


def launch(folder: str) -> None:
    """Be torchrun for the training processes. Where some fail, write down which ended how, the first one first, and
    exit with 1: torchrun would print a page about it."""
    logging.disable()
    config = DemoConfig.from_json((Path(folder) / CONFIG_FILE).read_text())
    child = interpreter_command("dyncp.demo.worker", "main", folder)
    try:
        arguments = ["--standalone", "--nproc-per-node", str(config.ranks), "--log-dir", folder, "--no-python", *child]
        run_torchrun(parse_args(arguments))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
        (Path(folder) / EXITS_FILE).write_text(json.dumps([[rank, failure.exitcode] for rank, failure in failures]))
        sys.exit(1)
    except SignalException as error:
        sys.exit(128 + error.sigval)


def end_with_demo() -> None:
    """End this process when the demo does: all its processes have the end of a pipe as stdin, which it never writes."""
    while os.read(0, 1):
        pass
    os._exit(1)


def main(folder: str) -> None:
    """Train one rank of the group that torchrun set up, by the configuration in `folder`; its results are written
    there."""
    threading.Thread(target=end_with_demo, daemon=True).start()
    torch.set_num_threads(1)
    config = DemoConfig.from_json((Path(folder) / CONFIG_FILE).read_text())
    dataset = TextFiles.from_json((Path(folder) / DOCUMENTS_FILE).read_text())
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    rank = dist.get_rank()
    try:
        result = train(config, dataset, rank, TcpStore.of_default_group())
    except Exception as error:  # noqa: BLE001 whatever it is, the demo reports it
        # The others will fail too, as their peer is gone; the time tells which failure came first.
        cause = f"{type(error).__name__}: {error}"
        failure = {"time_s": time.time(), "error": cause, "details": traceback.format_exc()}
        (Path(folder) / FAILURE_FILE.format(rank=rank)).write_text(json.dumps(failure))
        sys.exit(1)  # torchrun ends the others; the demo reports the failure, so no traceback here
    (Path(folder) / RESULT_FILE.format(rank=rank)).write_text(json.dumps(result))
    dist.destroy_process_group()
    # All is done and written. A thread of the process group's or of the store's that has not ended by now, as on a busy
    # machine, would abort the process while the interpreter takes itself down.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def train(config: DemoConfig, dataset: TextFiles, rank: int, store: TcpStore) -> dict[str, Any]:
    """Train one rank; its losses, loads, what its loader did, and how long each step waited for its plan."""
    loader = DynamicLoader(
        dataset,
        Planning(attention_shape(ModelSize()), config.cluster, config.strategy, config.options),
        Batching(config.tokens, config.max_length, config.seed, DocumentMasks(config.masks, config.seed)),
        LookAhead(config.kappa, config.workers, timeout_s=TIMEOUT_S),
        rank=rank,
        store=store,
    )
    trainer = Trainer(config.steps, config.seed, dist.all_reduce)
    losses: list[float] = []
    plans: list[RankPlan] = []
    waited_s = [0.0]  # until before each step
    with loader, contextlib.closing(endless(loader)) as batches:
        started = time.perf_counter()
        steps = itertools.islice(batches, config.steps)
        progress = tqdm(steps, config.strategy, config.steps, unit="step", disable=rank > 0)
        for batch in progress:
            attend = PlannedAttention(batch.plan)
            loss = trainer.step(batch.input_ids, batch.position_ids, batch.labels, batch.num_label_tokens, attend)
            losses.append(loss)
            waited_s.append(loader.report().waited_s)
            plans.append(batch.plan)
            progress.set_postfix(loss=f"{loss:.3f}")
        training_s = time.perf_counter() - started
    return {
        "losses": losses,
        "loads": [dataclasses.asdict(rank_load(plan)) for plan in plans],
        "loader": dataclasses.asdict(loader.report()),
        "waits_s": [after - before for before, after in itertools.pairwise(waited_s)],
        "training_s": training_s,
    }


def endless(loader: DynamicLoader) -> Generator[LocalBatch, None, None]:
    """Epoch after epoch."""
    epoch = 0
    while True:
        loader.set_epoch(epoch)
        yield from loader
        epoch += 1


class PlannedAttention:
    """Attention of the local tokens under a rank's plan."""

    def __init__(self, plan: RankPlan) -> None:
        self.plan = plan

    def __call__(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        return attention(q_THD, k_TGD, v_TGD, self.plan)
