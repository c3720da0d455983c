"""A variational autoencoder whose decoder refines a canvas step by step, and decides when it is done.

x is a binary image, v ~ N(0, I) its code. The decoder begins with a blank canvas u⁰ = 0. Every step reads the
canvas and v, and adds to the canvas, as in DRAW:

    uˡ = uˡ⁻¹ + write(silu(read(norm(uˡ⁻¹)) + recall(v)))

with the same weights each time. The canvas is kept as a code: logits of the pixels are a linear map of it,
so that a weighted mean of canvases is that of their logits. Halting heads see the canvas only, not the image:
the number of steps is a part of the *generative* model,

    p(x, v, z) = p(v) p(z | v) p(x | v, z),

and so E_q(v | x) E_p(z | v) log p(x | v, z) − KL(q(v | x) ‖ p(v)) is a lower bound of log p(x) in every mode:
discrete, thresholded (z a function of v), relaxed (ẑ in place of z) and ACT (weights a function of v).
"""

from typing import NamedTuple

from torch import Tensor, nn

from torchpact import AdaptiveBlock, Mode, Ponder


class Bound(NamedTuple):
    """The lower bound of log p(x) of every image, from one draw of v and of what the mode draws."""

    elbo: Tensor
    """log p(x | v, z) − KL, in nats, (batch,)."""
    kl: Tensor
    """KL(q(v | x) ‖ p(v)), in closed form, (batch,)."""
    ponder: Ponder | None
    """What the decoder did; None where the number of steps was given."""


class Refine(nn.Module):
    """A step of the decoder."""

    def __init__(self, width: int, latents: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.read = nn.Linear(width, width)
        self.recall = nn.Linear(latents, width, bias=False)
        self.write = nn.Linear(width, width)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        """Return the canvas after one more step."""
        change: Tensor = self.write(nn.functional.silu(self.read(self.norm(u)) + self.recall(v)))
        return u + change


class DrawingVAE(nn.Module):
    """The autoencoder.

    Args:
        pixels: How many an image has.
        latents: The size of v.
        width: That of the code of a canvas.
        encoder: That of the hidden layer of the encoder.
        max_steps: L.
        halting_bias: Where halting heads begin; their weights begin at 0.

    Example:
        >>> net = DrawingVAE(pixels=9, latents=2, width=4, encoder=8, max_steps=3)
        >>> x = torch.randint(2, (5, 9)).float()
        >>> bound = net(x, torch.randn(5, 2), mode="relaxed")
        >>> bound.elbo.shape, bound.ponder.steps.shape
        (torch.Size([5]), torch.Size([5, 1]))

    """

    def __init__(
        self,
        pixels: int = 784,
        latents: int = 16,
        width: int = 64,
        encoder: int = 128,
        max_steps: int = 8,
        halting_bias: float = -3.0,
    ) -> None:
        super().__init__()
        self.latents, self.width, self.max_steps = latents, width, max_steps
        self.encoder = nn.Sequential(nn.Linear(pixels, encoder), nn.SiLU(), nn.Linear(encoder, 2 * latents))
        heads = [nn.Linear(width, 1) for _ in range(max(max_steps - 1, 1))]
        for head in heads:
            nn.init.zeros_(head.weight)
            nn.init.constant_(head.bias, halting_bias)
        self.decoder = AdaptiveBlock(Refine(width, latents), heads, max_steps=max_steps)
        self.pixels = nn.Linear(width, pixels)

    def forward(
        self, x: Tensor, noise: Tensor, *, mode: Mode | str | None = None, steps: int | None = None
    ) -> Bound:
        """Return the bound for images.

        Args:
            x: Images of zeros and ones, (batch, pixels).
            noise: ε ~ N(0, I), (batch, latents): v = μ(x) + σ(x)·ε.
            mode: What decides how many steps are taken; by default that of the block.
            steps: Or how many are.

        """
        mean, log_sd = self.encode(x)
        v = mean + log_sd.exp() * noise
        kl = (0.5 * (mean.square() + (2 * log_sd).exp() - 1) - log_sd).sum(1)
        logits, ponder = self.decode(v, mode=mode, steps=steps)
        log_likelihood = -nn.functional.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1)
        return Bound(log_likelihood - kl, kl, ponder)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and logarithm of the standard deviation of q(v | x), both (batch, latents)."""
        mean, free = self.encoder(2 * x - 1).chunk(2, dim=1)
        # never wider than the prior: a few unusual images otherwise get codes of huge variance
        return mean, -nn.functional.softplus(free)

    def decode(
        self, v: Tensor, *, mode: Mode | str | None = None, steps: int | None = None
    ) -> tuple[Tensor, Ponder | None]:
        """Return the logits of the pixels for codes, (batch, pixels), and what the decoder did."""
        u, ponder = v.new_zeros(len(v), self.width), None
        if steps is None:
            u, ponder = self.decoder(u, v, mode=mode)
        else:
            for _ in range(steps):
                u = self.decoder.step_at(0)(u, v)
        return self.pixels(u), ponder
