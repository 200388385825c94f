"""A model and data of one's own for a potluck run: what comes next in a noisy wave."""

import torch
from torch import nn

from models.trainable import Trainable


class Waves(Trainable):
    sample = "32 points of a wave, and the one that comes next"

    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Linear(width, 1))

    def loss(self, batch):  # the mean over the samples, as torch's losses are by default
        guessed = self.layers(batch["past"]).squeeze(1)
        return nn.functional.mse_loss(guessed, batch["next"])

    def activation_bytes(self, samples, value_bytes=4):  # what volunteers are told of memory
        return samples * value_bytes * 2 * self.layers[0].out_features


def build_model(settings, *, seed):  # the same bits at every peer: only the seed decides
    torch.manual_seed(seed)
    return Waves(settings.get("width", 64))


def open_batches(settings, *, seed, peer, samples):  # each peer its own samples, without end
    chance = torch.Generator().manual_seed(seed ^ int.from_bytes(peer.encode()[-6:], "big"))
    noise = settings.get("noise", 0.05)
    while True:
        begin, pace = torch.rand(2, samples, 1, generator=chance)
        points = torch.sin(6.3 * begin + (0.1 + 0.4 * pace) * torch.arange(33))
        points += noise * torch.randn(samples, 33, generator=chance)
        yield {"past": points[:, :32], "next": points[:, 32]}
