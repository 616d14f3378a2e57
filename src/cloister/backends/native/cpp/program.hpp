// A decoder compiled into one call a step: the phases of each layer, each a list of tasks for the team.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "buffer.hpp"
#include "kernels.hpp"
#include "pool.hpp"

namespace cloister {

struct Layer {
    AttentionShape shape;
    float scale = 1;
    int rope = 0;
    Activation activation = Activation::silu;
    Matrix qkv, output, gate_up, down;
    const float *attention_norm = nullptr, *mlp_norm = nullptr, *q_norm = nullptr, *k_norm = nullptr;
    Cache cache;
    int num_blocks = 0;  // of the cache
};

struct Rope {
    std::vector<float> inv_freq;
    float scale = 1;
    std::vector<float> table;  // [num_positions][2][head_dim / 2]: cosines, sines
    int num_positions = 0;
};

// What ran when: one entry for each phase and thread.
struct Span {
    const char* name;
    int thread;
    double start_s, duration_s;
};

struct Batch {
    const int32_t *token_ids, *positions, *query_starts, *context_lens, *tables, *logit_rows;
    int num_tokens, num_sequences, table_stride, num_rows;
    const int32_t* parents;  // [num_tokens], or null
};

// One caller at a time (`Pool::take_turn`).
class Program {
public:
    Program(const Kernels& kernels, std::shared_ptr<Pool> pool, int vocab_size, int hidden_size, float norm_eps);

    std::vector<Layer> layers;  // all with blocks of one size
    std::vector<Rope> ropes;
    Matrix embedding, head;
    const float* norm_weight = nullptr;

    // Computes one step and writes logits [num_rows][vocab_size].
    // Throws std::invalid_argument, before anything is written, where a number of the batch leads out of an array.
    void forward(const Batch& batch, float* logits);

    // As `forward`, but writes the id of each row's largest logit, the lowest among equal ones; -1 where one is not finite.
    void forward_best(const Batch& batch, int32_t* best);

    // As `forward`, but chooses a token for each draw; -1 where a logit of its row is not finite.
    void forward_draw(const Batch& batch, const Draw* draws, int num_draws, int32_t* tokens);

    // Chooses tokens from logits [num_rows][vocab_size]. With `barred`, a token of minus infinity is one not to be chosen.
    void draw(const float* logits, int num_rows, const Draw* draws, int num_draws, bool barred, int32_t* tokens);

    // Overwrites what steps left in the buffers with zeros: the cache is the caller's.
    void wipe();

    Pool& pool() const { return *pool_; }
    int vocab_size() const { return vocab_size_; }
    int hidden_size() const { return hidden_size_; }
    void record(bool on) { recording_ = on; spans_.clear(); }
    const std::vector<Span>& spans() const { return spans_; }
    // Calls of `run` so far, and bytes of buffers: for the ratchets.
    uint64_t num_phases() const { return num_phases_; }
    size_t buffer_bytes();

private:
    template <class Work> void phase(const char* name, int num_tasks, Work&& work, int grain = 1);
    template <class Work> void each_row(const char* name, int num_rows, Work&& work);
    std::vector<Buffer*> buffers();
    void check(const Batch& batch) const;
    void extend_ropes(const Batch& batch);
    void place_tokens(const Batch& batch);
    void add_tree(const Batch& batch, Sequence sequence);
    void attention(const Layer& layer, const Batch& batch);
    void list_tasks(const Layer& layer);
    void product(const char* name, const Matrix& w, const Rows& x, const Sink& sink);
    Rows shape_rows(Buffer& buffer, Input input, int num_rows, int length);
    void reserve_scratch(size_t size);
    uint8_t* scratch(int thread) const;

    const Kernels& kernels_;
    std::shared_ptr<Pool> pool_;
    int vocab_size_, hidden_size_;
    float norm_eps_;
    size_t stride_;  // of the residual stream: whole panels

    Buffer residual_, normed_, inputs_, next_inputs_, qkv_, queries_, mixed_, wide_, partial_, logits_, peaks_;
    std::vector<Buffer> scratch_;
    std::vector<uint8_t> finite_;  // [num_rows][pieces of a row]
    std::vector<Sequence> sequences_;
    std::vector<const int32_t*> table_of_;  // [num_tokens]
    std::vector<int> slot_of_;               // [num_tokens]
    std::vector<std::vector<int32_t>> paths_;
    std::vector<AttentionTask> tasks_, dealt_;
    struct Join { AttentionTask task; const float* partial; int num_splits; };
    std::vector<Join> joins_;

    bool recording_ = false;
    std::vector<Span> spans_;
    uint64_t num_phases_ = 0;
};

}  // namespace cloister
