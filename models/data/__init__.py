"""Data for training: from shards to batches, in bounded memory, whatever the sources do.

The stages of an example, and the module of each:

    shards (disk, HTTP, `datasets`, the standard library)   file_shards, dataset_shards, …
      → documents, cut into examples of a bounded size      shard_reading, formats, source
      → in another order of shards for each peer            order
      → through a shuffle buffer                            shuffle_buffer
      → mixed with other sources by probability             mixture
      → packed into batches of tensors                      batches

`opening.open_data` puts them together. Everything is synchronous: the training thread pulls. Only
`reading_ahead` has a thread, which ends with the block that began it.

`position.Position` is where reading has got to; its module has the exact promises.
"""
