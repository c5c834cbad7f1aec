"""What every engine that reads Kafka shares: a run of batches, and the folding of one batch. It imports no Spark."""
