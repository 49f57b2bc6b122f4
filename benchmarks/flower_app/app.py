"""A federation of Flower whose clients return the parameters unchanged."""

import json
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

server = ServerApp()
client = ClientApp()


class TimedFedAvg(FedAvg):
    """Measures each round, from its first message to the new average."""

    seconds: list[float]

    def configure_train(self, *arguments, **options):
        self._started = time.perf_counter()
        return super().configure_train(*arguments, **options)

    def aggregate_train(self, *arguments, **options):
        answer = super().aggregate_train(*arguments, **options)
        if answer[0] is None:
            raise RuntimeError("no client has answered")
        self.seconds.append(time.perf_counter() - self._started)
        return answer


@server.main()
def run(grid: Grid, context: Context) -> None:
    """Runs all rounds, and writes their times to a file."""
    config = context.run_config
    clients = int(config["clients"])
    strategy = TimedFedAvg(
        fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients
    )
    strategy.seconds = []
    weights = np.full(int(config["parameters"]), 0.5, np.float32)
    strategy.start(grid, ArrayRecord([weights]), num_rounds=int(config["rounds"]))
    target = Path(str(config["times"]))
    partial = target.with_suffix(".partial")
    partial.write_text(json.dumps(strategy.seconds))
    partial.replace(target)


@client.train()
def train(message: Message, context: Context) -> Message:
    """Returns the parameters as they came."""
    content = RecordDict(
        {"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 2})}
    )
    return Message(content=content, reply_to=message)
