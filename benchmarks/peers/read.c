/* Read bandwidth of this machine: cc -O3 -march=native -pthread read.c -o read && ./read THREADS MIB ROUNDS
 * Each thread sums its own part of memory far larger than the caches; prints GB/s of every round. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { LANES = 32 }; /* four vectors of 64 bytes in flight */

struct part {
    const uint64_t *words;
    size_t count;
    uint64_t sum;
    pthread_barrier_t *gate;
    int rounds;
};

static uint64_t sum_words(const uint64_t *words, size_t count) {
    uint64_t lanes[LANES] = {0}, sum = 0;
    for (size_t i = 0; i < count; i += LANES) {
        __builtin_prefetch(words + i + 512);
        __builtin_prefetch(words + i + 520);
        __builtin_prefetch(words + i + 528);
        __builtin_prefetch(words + i + 536);
        for (int k = 0; k < LANES; k++) lanes[k] += words[i + k];
    }
    for (int k = 0; k < LANES; k++) sum += lanes[k];
    return sum;
}

static void *work(void *argument) {
    struct part *part = argument;
    memset((void *)part->words, 1, part->count * sizeof(uint64_t)); /* by the thread that reads it: near its memory */
    for (int round = 0; round < part->rounds; round++) {
        pthread_barrier_wait(part->gate);
        part->sum += sum_words(part->words, part->count);
        pthread_barrier_wait(part->gate);
    }
    return NULL;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

int main(int argc, char **argv) {
    if (argc != 4) return fprintf(stderr, "usage: %s THREADS MIB ROUNDS\n", argv[0]), 2;
    int threads = atoi(argv[1]), rounds = atoi(argv[3]);
    size_t each = ((size_t)atol(argv[2]) << 20) / threads / 4096 * 4096;
    pthread_barrier_t gate;
    pthread_barrier_init(&gate, NULL, threads + 1);
    struct part parts[threads];
    pthread_t ids[threads];
    for (int t = 0; t < threads; t++) {
        uint64_t *words = aligned_alloc(4096, each);
        if (!words) return fprintf(stderr, "not enough memory\n"), 1;
        parts[t] = (struct part){words, each / sizeof(uint64_t), 0, &gate, rounds};
        pthread_create(&ids[t], NULL, work, &parts[t]);
    }
    for (int round = 0; round < rounds; round++) {
        pthread_barrier_wait(&gate);
        double start = now();
        pthread_barrier_wait(&gate);
        printf("%.2f\n", (double)each * threads / (now() - start) / 1e9);
    }
    uint64_t sum = 0;
    for (int t = 0; t < threads; t++) pthread_join(ids[t], NULL), sum += parts[t].sum;
    return sum == 42;
}
