"""The model card of an adapted network: what a hub shows of it, as Markdown with a head of YAML."""

import re
from pathlib import Path
from typing import Any

from torchpact.adapt.network import inner_network
from torchpact.adapt.summary import summary

_CARD = """\
---
library_name: {library}
tags:
- adaptive-computation
- torchpact
{base}---

# {name}, made adaptive

Layers of this network have halting heads: {units} leave when they need no more. What was adapted:

```text
{summary}
```

```python
import torchpact as tp

net = tp.from_pretrained("the folder of these files"{more})
fast = tp.deploy(net, batch)    # it is faster only once deployed
```

The usual files hold the network without heads, which its own class loads; heads are in
`torchpact.safetensors`, what was adapted and thresholds in `torchpact.json`. What it was trained on, and
how well it does, is for its maker to say.
"""


def model_card(net: Any) -> str:
    """Return the card of an adapted network.

    Args:
        net: What :func:`~torchpact.adapt` returned.

    Raises:
        ValueError: It is not adapted.

    Example:
        >>> layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> net = tp.adapt(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False))
        >>> print(model_card(net).splitlines()[7])
        # TransformerEncoder, made adaptive

    """
    found, root = summary(net), inner_network(net)
    of_transformers = hasattr(getattr(root, "config", None), "to_json_string")
    base = getattr(getattr(root, "config", None), "name_or_path", "") or ""
    on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", base) is not None and not Path(base).exists()
    return _CARD.format(
        library="transformers" if of_transformers else "torchpact",
        base=f"base_model: {base}\n" if on_hub else "",
        name=found.network,
        units=" and ".join(sorted({f"{run.per}s" for run in found.runs})),
        summary=found,
        more="" if of_transformers else ", net=a_network_of_this_class",
    )
