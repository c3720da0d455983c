"""What attacks, damages and interrupts torchpact, and what must then happen."""
