//! The history of a volume's writes: layered bitmaps, epochs, replicas and their lineage.
