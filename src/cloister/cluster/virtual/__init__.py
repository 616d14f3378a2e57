"""A cluster in one thread, without a network and without a model: the engines, schedulers, clients and routers of production
under a virtual clock, with a network that can be told to fail. A seed decides everything, so every run can be repeated."""
