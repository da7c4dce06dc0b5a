"""gluon: the explicit style, in which you split each batch and see each device's part.

As the multi-GPU chapter of "Dive into Deep Learning" does it with MXNet Gluon, name for name::

    devices = evener.devices("cpu")
    gluon.initialize(net, gluon.Normal(sigma=0.01), devices)
    trainer = gluon.Trainer(gluon.collect_params(net), "sgd", {"learning_rate": 0.1})
    loss = nn.CrossEntropyLoss(reduction="sum")

    for X, y in batches:
        xs = gluon.split_and_load(X, devices, even_split=False)
        ys = gluon.split_and_load(y, devices, even_split=False)
        losses = [loss(net(x), y) for x, y in zip(xs, ys)]
        for l in losses:
            l.backward()
        trainer.step(len(X))

The devices work at the same time, forward and backward, although the program asks for one shard
after the other: :mod:`evener.gluon.explicit` tells how. The result is that of one device, however
a batch is split.

Source: https://d2l.ai/chapter_computational-performance/multiple-gpus-concise.html and
``mxnet.gluon``.
"""

from evener.gluon.initializer import Initializer, Normal, Uniform, Xavier
from evener.gluon.network import initialize, shares
from evener.gluon.parameter import Parameter, collect_params
from evener.gluon.split import split_and_load, split_data
from evener.gluon.trainer import Trainer

__all__ = [
    "Initializer",
    "Normal",
    "Parameter",
    "Trainer",
    "Uniform",
    "Xavier",
    "collect_params",
    "initialize",
    "shares",
    "split_and_load",
    "split_data",
]
