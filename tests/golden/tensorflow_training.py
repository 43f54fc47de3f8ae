"""Train Meta-dropout by a second program: a TensorFlow graph written from the equations, with its own optimiser.

    pip install tensorflow-cpu
    python tests/golden/tensorflow_training.py --out tf.npz    # 2000 iterations, Omniglot 5-way 1-shot; then evaluates

The golden values pin one task. This pins what surrounds it: initial values, averaging, clipping, the optimiser. The
weights that it ends with are put into this library's learner and tested on the episodes of `metadropout evaluate`.
Stopped, it goes on where it was, with a new stream of noise.

`--normalisation fused`, the default, is what the authors' program uses. Inside `tf.map_fn` TensorFlow silently leaves
its second derivative out; `--learner.norm_second_order false` does the same. `exact` is written out and has it.
"""

from __future__ import annotations

import argparse
import io
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow.compat.v1 as tf
import torch

import metadropout as md
from metadropout.config import build_learner
from metadropout.data.episodes import assemble
from metadropout.evaluation import evaluate
from metadropout.files import write_atomically
from metadropout.noise import mix_seed
from metadropout.recipes import load_recipe
from metadropout.training.allocator import keep_freed_memory
from metadropout.training.loop import TESTING, episode_sampler, open_splits

RECIPE = "omniglot-5way-1shot-metadropout"
WAY, QUERY, TASKS, STEPS, INNER_LR, META_LR, CLIP = 5, 15, 4, 5, 0.1, 1e-3, 3.0


def weights(scope: str, outputs: int) -> dict[str, Any]:
    """Return the variables of the network (θ) or of its twins (φ), made on the first call."""
    cut, normal = tf.truncated_normal_initializer(0, 0.02), tf.random_normal_initializer(0, 0.02)
    zero = tf.zeros_initializer()
    found = {}
    with tf.variable_scope(scope, reuse=tf.AUTO_REUSE):
        for layer in range(4):
            shape = [3, 3, 64 if layer else 1, 64]
            found[f"w{layer}"] = tf.get_variable(f"w{layer}", shape, initializer=cut)
            found[f"b{layer}"] = tf.get_variable(f"b{layer}", [64], initializer=zero)
        found["head_w"] = tf.get_variable("head_w", [64, outputs], initializer=normal)
        found["head_b"] = tf.get_variable("head_b", [outputs], initializer=zero)
    return found


def normalise(f: Any, offset: Any, fused: bool) -> Any:
    """Normalise by the statistics of the batch, with TensorFlow's fused operation or by operations written out."""
    if fused:
        return tf.nn.fused_batch_norm(f, tf.ones([64]), offset, epsilon=1e-3, is_training=True)[0]
    # Not by tf.nn.moments: it takes the mean in the variance for a constant, so its second derivative is not exact.
    mean = tf.reduce_mean(f, [0, 1, 2], keepdims=True)
    variance = tf.reduce_mean(tf.square(f - mean), [0, 1, 2], keepdims=True)
    return (f - mean) * tf.rsqrt(variance + 1e-3) + offset


def logits(x: Any, theta: dict[str, Any], phi: dict[str, Any], noise: bool, fused: bool) -> Any:
    """Run Conv4 on images of shape (n, 28, 28, 1); noise on support images only."""
    for layer in range(4):
        w, b = f"w{layer}", f"b{layer}"
        f = tf.nn.conv2d(x, theta[w], 1, "SAME") + theta[b]
        a = tf.nn.conv2d(x, phi[w], 1, "SAME") + phi[b]
        f *= tf.nn.softplus(a + tf.random_normal(tf.shape(a)) if noise else a)
        with tf.variable_scope("norm", reuse=tf.AUTO_REUSE):
            offset = tf.get_variable(f"offset{layer}", [64], initializer=tf.zeros_initializer())
        x = tf.nn.max_pool2d(tf.nn.relu(normalise(f, offset, fused)), 2, 2, "VALID")
    x = tf.reshape(x, [-1, 64])
    out = tf.matmul(x, theta["head_w"]) + theta["head_b"]
    if noise:
        sigma = tf.nn.softplus(tf.matmul(x, phi["head_w"]) + phi["head_b"])  # (n, 1): one per image
        out += sigma * tf.random_normal(tf.shape(out))
    return out


def query_loss(task: tuple[Any, Any, Any, Any], fused: bool) -> tuple[Any, Any]:
    """Adapt to one task; return loss and accuracy on its query images."""
    support_x, support_y, query_x, query_y = task
    theta, phi = weights("theta", WAY), weights("phi", 1)
    cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits
    for _ in range(STEPS):
        loss = tf.reduce_mean(cross_entropy(support_y, logits(support_x, theta, phi, True, fused)))
        gradients = tf.gradients(loss, list(theta.values()))
        theta = {name: w - INNER_LR * g for (name, w), g in zip(theta.items(), gradients, strict=True)}
    out = logits(query_x, theta, phi, False, fused)
    correct = tf.equal(tf.argmax(out, 1, output_type=tf.int32), query_y)
    return tf.reduce_mean(cross_entropy(query_y, out)), tf.reduce_mean(tf.cast(correct, tf.float32))


def draw_tasks(sampler: md.EpisodeSampler, iteration: int, shared_classes: bool) -> list[md.Episode]:
    """Draw a meta-batch; with shared classes all tasks have those of the first, as in the authors' public code."""
    drawn = [sampler.indices(iteration, task) for task in range(TASKS)]
    if shared_classes:
        drawn = [indices._replace(classes=drawn[0].classes) for indices in drawn]
    return [assemble(sampler.images, indices, sampler.shot).to("cpu") for indices in drawn]


def train(out: Path, iterations: int, seed: int, threads: int, shared_classes: bool, fused: bool) -> None:
    """Train, or go on training, and write weights and the optimiser's state to a file."""
    tf.disable_eager_execution()
    tf.disable_control_flow_v2()
    tf.set_random_seed(seed)
    images = [tf.placeholder(tf.float32, [TASKS, None, 28, 28, 1]) for _ in range(2)]
    labels = [tf.placeholder(tf.int32, [TASKS, None]) for _ in range(2)]
    inputs = images[0], labels[0], images[1], labels[1]
    kinds = (tf.float32, tf.float32)
    losses, accuracies = tf.map_fn(partial(query_loss, fused=fused), inputs, dtype=kinds, parallel_iterations=TASKS)
    optimizer = tf.train.AdamOptimizer(META_LR)
    gradients = optimizer.compute_gradients(tf.reduce_mean(losses))
    step = optimizer.apply_gradients([(tf.clip_by_value(g, -CLIP, CLIP), v) for g, v in gradients])

    config = load_recipe(RECIPE)
    sampler = md.EpisodeSampler(open_splits(config).train, way=WAY, shot=1, query=QUERY, seed=seed)
    limits = tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=threads)
    variables = tf.global_variables()
    with tf.Session(config=limits) as session:
        session.run(tf.global_variables_initializer())
        begin = restore(session, variables, out)
        recent, start = [], time.monotonic()
        for iteration in range(begin + 1, iterations + 1):
            tasks = draw_tasks(sampler, iteration, shared_classes)
            fed = [np.stack([getattr(task, name).numpy() for task in tasks]) for name in vars(tasks[0])]
            fed = [a.transpose(0, 1, 3, 4, 2) if a.ndim == 5 else a for a in fed]
            _, found = session.run([step, accuracies], dict(zip(inputs, fed, strict=True)))
            recent.append(found.mean())
            if iteration % 50 == 0 or iteration == iterations:
                passed = time.monotonic() - start
                print(f"iteration {iteration}: accuracy {100 * np.mean(recent):.2f} %, {passed:.0f} s", flush=True)
                recent = []
                content = io.BytesIO()
                values = dict(zip([v.op.name for v in variables], session.run(variables), strict=True))
                np.savez(content, iteration=iteration, **values)
                write_atomically(out, content.getvalue())


def restore(session: Any, variables: list[Any], path: Path) -> int:
    """Put the values of a file back, if it is there; return the iterations that they have behind them."""
    if not path.exists():
        return 0
    with np.load(path) as stored:
        for variable in variables:
            variable.load(stored[variable.op.name], session)
        return int(stored["iteration"])


def test(path: Path, episodes: int) -> None:
    """Evaluate the weights of a file as `metadropout evaluate` does, with S = 30."""
    config = load_recipe(RECIPE)
    splits = open_splits(config)
    learner = build_learner(config, splits.train.image_shape)
    parameters = dict(learner.named_parameters())
    with np.load(path) as stored, torch.no_grad():
        for layer in range(4):
            parameters.pop(f"network.blocks.{layer}.norm.bias").copy_(torch.tensor(stored[f"norm/offset{layer}"]))
            twins = "perturbation.generators.blocks/"
            for scope, name in ("theta", f"network.blocks.{layer}.conv"), ("phi", f"{twins}{layer}/conv"):
                kernel = stored[f"{scope}/w{layer}"].transpose(3, 2, 0, 1)  # (out, in, height, width)
                parameters.pop(f"{name}.weight").copy_(torch.tensor(kernel))
                parameters.pop(f"{name}.bias").copy_(torch.tensor(stored[f"{scope}/b{layer}"]))
        for scope, name in ("theta", "network.head"), ("phi", "perturbation.generators.head"):
            parameters.pop(f"{name}.weight").copy_(torch.tensor(stored[f"{scope}/head_w"].T))
            parameters.pop(f"{name}.bias").copy_(torch.tensor(stored[f"{scope}/head_b"]))
        iteration = int(stored["iteration"])
    if parameters:
        raise SystemExit(f"no values for {', '.join(parameters)}")
    learner.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    keep_freed_memory()
    sampler, seed = episode_sampler(config, splits, "test", TESTING, 0), mix_seed(0, TESTING)
    result = evaluate(learner, sampler, episodes=episodes, mc_samples=30, seed=seed, threads=torch.get_num_threads())
    print(f"{path}, iteration {iteration}: {result} on {episodes} episodes of test classes, S = 30")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file of the weights; training goes on from it")
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--episodes", type=int, default=1000, help="of test classes; 0 to train only")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--normalisation", choices=["fused", "exact"], default="fused")
    parser.add_argument("--shared-classes", action="store_true", help="the same classes in all tasks of a meta-batch")
    arguments = parser.parse_args()
    train(
        arguments.out,
        arguments.iterations,
        arguments.seed,
        arguments.threads,
        arguments.shared_classes,
        arguments.normalisation == "fused",
    )
    if arguments.episodes:
        test(arguments.out, arguments.episodes)
