"""GEMMs of other makes, intercepted where torch dispatches them, and assigned to the module and the weight they belong to."""
