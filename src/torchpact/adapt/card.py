"""The model card of an adapted network for a hub: Markdown with a YAML header."""

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

The layers of this network have halting heads, so that {units} can stop before the last layer:

```text
{summary}
```

```python
import torchpact as tp

net = tp.from_pretrained("the folder of these files"{more})
fast = tp.deploy(net, batch)    # it is faster only once deployed
```

The usual files hold the network without heads, which its own class loads. Heads are in
`torchpact.safetensors`, configuration and thresholds in `torchpact.json`. Add here what the network was
trained on, and how well it does.
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
