//! The sans-IO core: how a volume is copied and how it changes hands.
