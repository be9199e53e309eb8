"""The recording side: rows to a stream, the stream to Parquet, one writer a folder; numpy and pyarrow only."""
