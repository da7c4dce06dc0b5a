"""The textbook: the multi-GPU chapter of "Dive into Deep Learning" as a job that can be run.

It is the showcase of evener and uses nothing but its public names::

    resnet          the model of the chapter
    fashion_mnist   its data: a sample in this package, or the full set
    download        how the full set is fetched
    record          what a training is asked to do, and what it did
    main_job        the training: a plain PyTorch loop, and one line
    comparison      what two runs of it say together
    bench           how fast each device is alone, and how fast all are together
    progress        what the command line shows meanwhile

``evener train`` and ``evener bench`` run it. The files are imported one by one (``from
evener.textbook import main_job``): a program that only wants to read the settings does not wait
for torch.
"""
