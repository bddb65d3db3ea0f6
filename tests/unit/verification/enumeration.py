"""What the proofs by enumeration share: random distributions in fractions, and the distance from the target's."""

from collections import defaultdict
from fractions import Fraction
from itertools import product
from random import Random

import numpy as np


class Distributions:
    """A distribution for every context: random fractions, among them zeros."""

    def __init__(self, seed, zeros=0.15, vocab_size=3):
        self.seed = seed
        self.vocab_size = vocab_size
        self.zeros = zeros
        self.known = {}

    def __getitem__(self, context):
        if context not in self.known:
            random = Random(f"{self.seed}{context}")
            weights = [0 if random.random() < self.zeros else random.randint(1, 9) for _ in range(self.vocab_size)]
            if not any(weights):
                weights[random.randrange(self.vocab_size)] = 1
            self.known[context] = np.array([Fraction(weight, sum(weights)) for weight in weights], dtype=object)
        return self.known[context]


def total_variation(distribution, target, length, vocab_size=3):
    """Between what is emitted, completed to `length` tokens by the target, and the target itself."""
    completed = defaultdict(Fraction)
    for tokens, accept_prob in distribution.items():
        for rest in product(range(vocab_size), repeat=length - len(tokens)):
            mass = accept_prob
            for i, token in enumerate(rest):
                mass *= target[(*tokens, *rest[:i])][token]
            completed[(*tokens, *rest)] += mass
    distance = Fraction(0)
    for tokens in product(range(vocab_size), repeat=length):
        mass = Fraction(1)
        for i, token in enumerate(tokens):
            mass *= target[tokens[:i]][token]
        distance += abs(mass - completed[tokens])
    return distance / 2
