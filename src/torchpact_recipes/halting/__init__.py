"""Does halting pay? Pretrained networks trained with exits, beside networks with fewer layers.

    python -m torchpact_recipes.halting.reviews     MiniLM on the polarity of film reviews, per example
    python -m torchpact_recipes.halting.stories     stories15M on the next token of its own stories, per token

Each trains what it compares (resumed arm by arm), chooses criteria and thresholds on validation data, opens
the test data once, and leaves CSV files in results/halting.
"""
