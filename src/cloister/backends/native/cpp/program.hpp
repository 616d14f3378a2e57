// A decoder compiled into one call a step: the phases of each layer, each a list of tasks for the team.
#pragma once
#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "buffer.hpp"
#include "kernels.hpp"
#include "lora.hpp"
#include "pool.hpp"

namespace cloister {

// Without a weight: none.
struct Norm {
    const float *weight = nullptr, *bias = nullptr;
};

struct FeedForward {
    Matrix up, down;  // up: where gated, gate and up in one, 16 outputs of each in turn
    Activation activation = Activation::silu;
    bool gated = true;
    float gate_scale = 1, output_scale = 1;  // of what the gate and `down` return
    Clipping clipping = {};
    std::optional<float> sparse = {};  // gates count from so many deviations above their mean on
};

// A mixture of experts, all of one shape and number format. The router is float32; with `shared_gate` it has one output more,
// which says how much of the shared feed-forward counts.
struct Mixture {
    Matrix router;
    std::vector<FeedForward> experts;
    Routing routing;
    bool shared_gate = false;
    std::optional<FeedForward> shared;
    bool weighs_inputs = false;  // a weight multiplies what its expert reads, not what it returns
};

// What latent attention multiplies with beside `Layer::qkv`, whose outputs are queries, or their latent, and then the latent of keys
// with its rotated part. A head's query is `plain_dim` numbers and a rotated part.
struct Latent {
    Matrix queries;    // from the latent of queries, where there is one: `query_rank` is not 0
    std::vector<Matrix> absorb, expand;  // of each head: plain part of a query to one that meets latents; latent to value
    const float *query_norm = nullptr, *key_norm = nullptr;
    float eps = 0;
    int query_rank = 0, plain_dim = 0;
    int key_column = 0;  // where the latent of keys begins in outputs of `qkv`
};

// A gated short convolution in place of attention: `Layer::qkv` gives B, C and x, each of `size` numbers. Or the convolution of `Mamba2` or `DeltaNet`.
struct ShortConv {
    const float *filters = nullptr, *bias = nullptr;  // [kernel_size][size], the filter of the oldest input first; [size], or null
    int kernel_size = 0, size = 0;
    float* states = nullptr;  // [num_blocks][state_size]: the last inputs [kernel_size - 1][size], oldest first; then those of heads
    int first_block = 0, num_blocks = 0;
    size_t state_size = 0;
    size_t draft_size = 0, draft_start = 0;  // numbers kept of a draft; those of layers before
    size_t window() const { return size_t(kernel_size - 1) * size_t(size); }
    bool has_block(int block) const { return block >= first_block && block - first_block < num_blocks; }
    float* state(int block) const { return states + size_t(block - first_block) * state_size; }
};

// Mamba 2 in place of attention: `Layer::qkv` gives the gate; x, B and C, which pass `Layer::short_conv`; and dt of each head.
struct Mamba2 {
    int num_heads = 0, head_dim = 0, num_groups = 0, d_state = 0;
    float least_dt = 0, greatest_dt = 0;
    const float *a_log = nullptr, *skip = nullptr, *dt_bias = nullptr;  // [num_heads]
    const float* norm = nullptr;  // [inner], over each group; or null
    bool norms_before_gate = false;
    Activation activation = Activation::silu;  // behind the convolution
    float scales[5] = {1, 1, 1, 1, 1};  // of the gate, x, B, C and dt
    bool is_scaled() const { return std::any_of(scales, scales + 5, [](float scale) { return scale != 1; }); }
    size_t inner() const { return size_t(num_heads) * size_t(head_dim); }
    size_t head_state() const { return size_t(head_dim) * size_t(d_state); }
};

// A gated delta net in place of attention: `Layer::qkv` gives z; and q, k and v, which pass `Layer::short_conv`.
struct DeltaNet {
    DeltaHeads heads;
    Matrix steps;                 // gives b and a of each value head, beside `Layer::qkv`
    const float* norm = nullptr;  // [value_dim], over each head
    Activation activation = Activation::silu;
    size_t features(const Matrix& qkv) const { return size_t(qkv.panels + steps.panels) * panel_width; }
};

// A matrix of numbers as a file has them, a row for each token.
struct InputTable {
    const uint8_t* numbers = nullptr;
    NumberType type = NumberType::f32;
    Matrix packed;  // in place of `numbers`
    int num_rows = 0;
    void read(const Kernels& kernels, int row, int length, float* out) const {
        if (packed.codes) return kernels.read_row(packed, row, out);
        kernels.read_numbers(numbers + size_t(row) * size_t(length) * (type == NumberType::f32 ? 4 : 2), type, length, out);
    }
};

// Several residual streams of each token (backends/spec.py, StreamsSpec), and what is before the first layer and after the last.
struct Streams {
    int num_streams = 1, active = 0, input_size = 0;
    Matrix in;                // all but the first, one below the other; without codes where there is one stream
    std::vector<Matrix> out;  // of all but the first
    Matrix projection;        // gives inputs of all layers
    const float* projection_norm = nullptr;  // [input_size]
    InputTable table;
};

// What a block has for them.
struct StreamLayer {
    const float *router = nullptr, *predict = nullptr, *correct = nullptr;  // [n][hidden], [n * n][n], [n][n] of n streams
    const float* scale = nullptr;  // [hidden], or null
    Norm router_norm, laurel_norm, input_norm;
    Matrix laurel_left, laurel_right, input_gate, input_out;
};

// Queries are multiplied by 1 + beta * log(1 + (position + first) / period), rounded down; period 0: they are not.
struct QueryGrowth {
    float beta = 0;
    int period = 0, first = 0;
    float operator()(int position) const;
};

// A part that a layer lacks has no matrices.
struct Layer {
    AttentionShape shape;
    float scale = 1;
    QueryGrowth growth;
    int rope = -1;  // -1: none
    Matrix qkv, output;
    float input_scale = 1, output_scale = 1;  // of what `qkv` reads and `output` returns
    std::optional<Latent> latent;
    std::optional<ShortConv> short_conv;  // in place of attention
    std::optional<Mamba2> mamba2;         // with `short_conv`
    std::optional<DeltaNet> delta_net;    // with `short_conv`
    bool gated = false;                   // `qkv` gives gates too, with which outputs of heads are multiplied
    std::shared_ptr<Layer> beside;        // a mixer with a state beside attention: it reads the same, and both outputs are added
    Norm attention_norm, mlp_norm, attention_post_norm, mlp_post_norm;
    const float *q_norm = nullptr, *k_norm = nullptr, *v_norm = nullptr;
    bool norms_projection = false;  // q and k are normed over all heads together
    FeedForward mlp;
    std::optional<Mixture> mixture;  // in place of `mlp`
    std::shared_ptr<StreamLayer> stream;  // where there are several
    bool parallel = false;           // the feed-forward reads what attention reads
    float residual_scale = 1;
    Cache cache;
    bool shares_kv = false;  // the cache is an earlier layer's: `qkv` gives queries only
    int num_blocks = 0;  // of the cache
    int group = 0;       // of `Program::groups`

    bool mixes() const { return qkv.codes; }
    bool attends() const { return mixes() && !short_conv; }
    // Outputs of `qkv` that are keys, or values.
    int key_width() const { return shares_kv ? 0 : shape.num_kv_heads * shape.head_dim; }
    bool feeds() const { return mixture || mlp.down.codes; }
    // The mixer with a state, or null.
    const Layer* stateful() const { return short_conv ? this : beside.get(); }
};

// Layers that share block tables. Blocks are numbered through all groups. With a window, what lies behind it need not be there:
// caches have one block more, the last, which stays empty. Blocks of a group with `is_state` hold states in place of keys, those of one
// with `is_recent` the newest keys of layers that pack the others, which are in another group too.
struct KVGroup {
    int first_block = 0, num_blocks = 0, window = 0;
    bool is_state = false, is_recent = false;
};

// [head][block]: x + down(activation(up(x))), the next block after that. Float32 or bfloat16, all of one shape.
using DraftHeads = std::vector<std::vector<FeedForward>>;

struct Rope {
    std::vector<float> inv_freq;
    float scale = 1;
    std::vector<int> axes;  // which of a token's three positions turns each frequency; empty where it has one
    std::vector<float> table = {};  // [num_positions][2][inv_freq]: cosines, sines
    int num_positions = 0;
};

// What ran when: one entry for each phase and thread.
struct Span {
    const char* name;
    int thread;
    double start_s, duration_s;
};

// Tokens [first, end) of one sequence go on from the state in one block and leave theirs in another; -1: they are drafts.
struct StateSpan {
    int32_t first, end, read, written;
};

struct Batch {
    const int32_t *token_ids, *positions, *query_starts, *context_lens, *tables, *logit_rows;
    int num_tokens, num_sequences, table_stride, num_rows;
    const int32_t* parents;  // [num_tokens], or null
    const int32_t* adapters = nullptr;  // [num_sequences] slots, or null; one that is empty, or no slot, changes nothing
    const StateSpan* state_spans = nullptr;  // where layers have a state
    int num_state_spans = 0;
    const float* embeddings = nullptr;  // [num_embeddings][num_parts][hidden_size]: a part in place of what tokens are looked up as, and
    const int32_t* embedding_rows = nullptr;  // one behind each of the first layers
    int num_embeddings = 0, num_parts = 1;
    const int32_t* rope_positions = nullptr;  // [3][num_tokens] time, row and column, or null
    const int32_t* last_seen = nullptr;       // [num_tokens] positions, or null: a token sees none after its own
    const float* hidden = nullptr;  // [num_tokens][hidden_size], where the program merges it with embeddings
    const int32_t* document_ranges = nullptr;  // [num_sequences][2] first and end position of what is weighed; equal ones for none; or null
    const float* document_weights = nullptr;   // [num_sequences][2] temperature and scale
    float* residual = nullptr;  // [num_tokens][hidden_size] of one layer alone, what it reads and then what it leaves, or null
    int layer = 0;              // its number
};

// One caller at a time (`Pool::take_turn`).
class Program {
public:
    Program(const Kernels& kernels, std::shared_ptr<Pool> pool, int vocab_size, int hidden_size, float norm_eps);

    std::vector<Layer> layers;  // all with blocks of one size
    std::vector<KVGroup> groups;
    std::vector<Rope> ropes;
    Matrix embedding, head, positions;  // positions: without codes, none are learned
    Norm norm;
    Matrix merge;  // of embeddings and hidden states, [hidden_size][2 * hidden_size]; without codes, embeddings are what layers read
    Norm merge_embedding_norm, merge_hidden_norm;
    std::optional<Streams> streams;
    bool centres = false;  // norms are layer norms
    float embedding_scale = 1, logit_scale = 1, logit_softcap = 0;

    // Computes one step and writes logits [num_rows][vocab_size].
    // Throws std::invalid_argument, before anything is written, where a number of the batch leads out of an array.
    void forward(const Batch& batch, float* logits);

    // As `forward`, but writes the id of each row's largest logit, the lowest among equal ones; -1 where one is not finite.
    void forward_best(const Batch& batch, int32_t* best);

    // As `forward`, but writes what the head would read, the last layer's output after the final norm: [num_rows][hidden_size].
    void forward_hidden(const Batch& batch, float* hidden);

    // As `forward`, but chooses a token for each draw; -1 where a logit of its row is not finite.
    void forward_draw(const Batch& batch, const Draw* draws, int num_draws, int32_t* tokens);

    // As `forward_draw`; also writes what `find_top` finds in the step's rows.
    void forward_watched(const Batch& batch, const Draw* draws, int num_draws, int32_t* tokens, int num_top, int32_t* top);

    // Writes the ids [num_rows][num_top] of the largest logits, at most `vocab_size`, the largest first and the lowest ids first
    // among equal ones; -1 throughout a row that is not finite.
    void find_top(const float* logits, int num_rows, int num_top, int32_t* top);

    // What the head read in the last step, or would have read: hidden states after the final norm, [num_head_rows][hidden_size].
    void read_hidden(float* hidden);
    int num_head_rows() const { return int(head_rows_.size()); }

    // As `read_hidden`, but of every token of the last step: [num_step_tokens][hidden_size].
    void read_every_hidden(float* hidden);
    int num_step_tokens() const { return num_step_tokens_; }

    // Writes logits [num_rows][vocab_size] of hidden states after the final norm.
    void project(const float* hidden, int num_rows, float* logits);

    // Keeps heads that `guess` knows by the number returned.
    size_t load_heads(DraftHeads heads);
    size_t num_heads(size_t loaded) const { return loaded < draft_heads_.size() ? draft_heads_[loaded].size() : 0; }

    // What the first heads make of hidden states [num_rows][hidden_size] after the final norm, read by the model's head: the ids
    // of the largest logits as `find_top` writes them, [num_heads][num_rows][num_top].
    void guess(size_t loaded, const float* hidden, int num_rows, int num_heads, int num_top, int32_t* top);

    // Copies K and V of single positions from slot to slot in every layer, one move after the other. A slot is a block and a
    // position in it, as one number. Throws std::invalid_argument, before anything is written, where there is no such slot.
    void move_positions(const int32_t* moves, int num_moves);
    // The number of the group of the newest keys, or -1.
    int recent_group() const;

    // Lets accepted drafts of the last step change states, and forgets the others: pairs of a token of that step and the block of its
    // state, parents first. Throws std::invalid_argument, before anything is written, where there is no such draft or block.
    void accept_drafts(const int32_t* accepted, int num_accepted);

    // Chooses tokens from logits [num_rows][vocab_size]. With `barred`, a token of minus infinity is one not to be chosen.
    void draw(const float* logits, int num_rows, const Draw* draws, int num_draws, bool barred, int32_t* tokens);
    // As `forward_draw` draws from `logits`, among the tokens of each draw's mask: one bit a token, `num_words` words a draw.
    void draw_masked(const float* logits, const Draw* draws, int num_draws, const uint32_t* masks, size_t num_words, int32_t* tokens);

    // `forward_draw` with masks in two halves, so that masks can be worked out meanwhile: the logits stay here until `draw_kept`
    // or the next step. Throws std::invalid_argument where a draw names a row that was not kept.
    void forward_keep(const Batch& batch);
    void draw_kept(const Draw* draws, int num_draws, const uint32_t* masks, size_t num_words, int32_t* tokens);

    // Puts an adapter of as many layers as the program in a slot, and takes it out again.
    void load_adapter(size_t slot, std::unique_ptr<Adapter> adapter);
    void unload_adapter(size_t slot);

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
    // Rows of inputs; the same as another product takes them (a mixture's shared feed-forward), and for a router, in float32.
    struct Normed { Rows rows, exact, other; };
    struct Product { const Matrix* w; Rows x; Sink sink; };
    // Where the tokens of a step go in a mixture. A pair is a token and one of its experts; pairs are gathered by expert.
    struct Routes {
        int32_t* chosen;   // [num_pairs] experts of each token, the highest weight first
        float* weights;    // [num_pairs]
        float* shares;     // [num_tokens]: what the shared feed-forward counts
        int32_t* places;   // [num_pairs]: the gathered row of a pair
        int32_t* starts;   // [num_experts + 1]: the gathered rows of each expert
        int num_pairs = 0;
        int count(size_t expert) const { return starts[expert + 1] - starts[expert]; }
    };

    template <class Work> void phase(const char* name, int num_tasks, Work&& work, int grain = 1);
    template <class Work> void each_row(const char* name, int num_rows, Work&& work);
    std::vector<Buffer*> buffers();
    void check(const Batch& batch) const;
    void extend_ropes(const Batch& batch);
    const float* angles(const Rope& rope, const Batch& batch, int row, float* chosen) const;
    void place_tokens(const Batch& batch);
    void enter_group(const Batch& batch, int number);
    void move_recent(const Layer& layer, const int32_t* moves, int num_moves) const;
    void list_paths(const Batch& batch, const Sequence& sequence);
    int rows_at_once(const Sequence& sequence, const AttentionShape& shape) const;
    void embed(const Batch& batch);
    void decode_layer(const Layer& layer, const Batch& batch, const Layer*& previous);
    void check_layer_batch(const Batch& batch) const;
    void forward_layer(const Batch& batch, float* logits);
    void add_deepstack(const Batch& batch, int number);
    void merge_hidden(const Batch& batch);
    void apply(const Norm& norm, const float* row, float* out) const;
    Normed norm_rows(const char* name, const Norm& norm, const Matrix& w, int num_tokens, Buffer& buffer,
                     const Mixture* mixture = nullptr, const Matrix* other = nullptr, float scale = 1);
    void mix(const Layer& layer, const Batch& batch, const Layer*& previous);
    void mix_states(const Layer& layer, const Batch& batch, const Normed& inputs, const Sink& sink);
    void attention_block(const Layer& layer, const Batch& batch, const Rows& inputs, const Sink& sink);
    void place_heads(const Layer& layer, const Batch& batch, float* qkv, size_t stride);
    void place_latents(const Layer& layer, const Batch& batch, float* first, size_t stride);
    const float* expand_latents(const Layer& layer, int num_tokens);
    template <class Write> void multiply_heads(const char* name, const std::vector<Matrix>& matrices, int num_tokens, float* out, Write&& write);
    void attention(const Layer& layer, const Batch& batch);
    // short_conv.cpp
    const ShortConv* first_state() const;
    void check_states(const Batch& batch) const;
    void place_states(const Batch& batch);
    void short_conv_block(const Layer& layer, const Batch& batch, const Rows& inputs, const Sink& sink);
    const float* conv_input(const ShortConv& conv, const float* gated, size_t stride, int token, int back) const;
    void leave_states(const ShortConv& conv, const Batch& batch, const float* gated, size_t stride);
    // mamba2.cpp
    void mamba2_block(const Layer& layer, const Batch& batch, const Rows& inputs, const Sink& sink);
    void scale_sections(const Mamba2& mamba, float* projected, size_t stride, int num_tokens);
    void accept_mamba2(const Layer& layer, const float* kept, int block);
    // delta_net.cpp
    void delta_net_block(const Layer& layer, const Batch& batch, const Normed& inputs, const Sink& sink);
    void accept_delta_net(const Layer& layer, const float* kept, int block);
    // streams.cpp
    size_t input_stride() const { return size_t(streams->projection.panels) * panel_width; }
    float* streams_of(int token) const;
    void widen(const Batch& batch);
    void scale_streams(float* its) const;
    void route_streams(const StreamLayer& layer, const float* row, float* normed, float* routed) const;
    void predict_streams(const StreamLayer& layer, int token, int thread);
    void laurel(const StreamLayer& layer, const Rows& inputs);
    void stream_block(const Layer& layer, const Batch& batch, const Layer*& previous, const Layer* next);
    void add_layer_inputs(const Layer& layer, const Rows& gate_rows);
    void join_streams(const int32_t* tokens, int num_rows);
    // scan.hpp
    template <class StateIn, class Advance> void scan(const Batch& batch, int sequence, size_t size, float* copies, StateIn&& state_in, Advance&& advance) const;

    void find_shared_splits(const AttentionShape& shape);
    void share_split(const AttentionShape& shape, std::vector<int> members, int split);
    size_t count_shared_floats(const AttentionShape& shape);
    void list_shared_tasks(const AttentionShape& shape, float* partial);
    void list_tasks(const Layer& layer);
    void list_own_tasks(const AttentionShape& shape, int s);
    int count_cuts(const AttentionTask& task) const;
    size_t count_cut_floats(const AttentionShape& shape, size_t most) const;
    void cut_tasks(const AttentionShape& shape, float* partial);
    void deal(std::vector<AttentionTask>& tasks);
    void feed_forward(const FeedForward& mlp, const Rows& inputs, Sink end, const Layer* adapted = nullptr);
    Sink up_sink(const FeedForward& mlp, Rows& next, uint16_t* wide) const;
    void mixture(const Layer& layer, const Normed& inputs);
    Routes route(const Mixture& mixture, const Rows& inputs);
    void sort_pairs(const Mixture& mixture, const Routes& routes);
    float* run_experts(const Mixture& mixture, const Normed& inputs, const Routes& routes);
    Rows gather(const Mixture& mixture, const Rows& inputs, const Routes& routes);
    Rows gather_weighted(const Mixture& mixture, const Rows& exact, const Routes& routes);
    bool adds_at_once(const Layer& layer, const Norm& post) const { return !post.weight && layer.residual_scale == 1; }
    Sink branch_sink(const Layer& layer, const Norm& post, int num_tokens);
    void join_branch(const Layer& layer, const Norm& post, int num_tokens);
    void add_branch(const Layer& layer, const Norm& post, float* branch, int row);
    void head_logits(const Batch& batch, float* logits);
    void multiply_head(int num_rows, const std::function<void(int row, float* to)>& read, float* logits);
    void read_hidden_row(int i, float* to) const;
    void guess_block(const DraftHeads& heads, size_t block, float* states, int num_heads, int num_rows);
    template <class Find> float* find_in_pieces(int num_rows, Find&& find);
    const float* find_peaks(const float* logits, int num_rows, bool barred);
    bool is_finite(int row) const;
    void choose_plain(const float* peaks, const float* logits, const Draw* draws, int num_draws, int32_t* tokens);
    void list_top(const float* peaks, const float* logits, int num_rows, int num_top, int32_t* top);
    template <class RowOf> void choose(const float* peaks, const Draw* draws, int num_draws, RowOf&& row_of, int32_t* tokens);
    void choose_masked(float* masked, const float* logits, const Draw* draws, int num_draws, const uint32_t* masks, size_t num_words,
                       int32_t* tokens);
    // lora.cpp
    using ReadRow = std::function<void(int token, int index, float* to)>;
    void list_adapters(const Batch& batch);
    bool changes(const Layer& layer, std::initializer_list<UpdatePlace> places) const;
    void adapt(const Layer& layer, std::initializer_list<UpdatePlace> places, int length, const ReadRow& read, float* out, size_t stride, float scale = 1);
    void add_gained(const AdapterTask& task, const UpdatePlace& place, const float* gained, int panel, int outputs, float* out, size_t stride, float scale);
    void adapt_heads(const Layer& layer, float* qkv, size_t stride);
    void adapt_latent_queries(const Layer& layer, const float* latents, size_t stride, float* queries, size_t query_stride);
    void adapt_output(const Layer& layer, const float* mixed, const Sink& sink);
    void keep_normed(const Layer& layer);
    void product_stored(const FeedForward& mlp, const Rows& inputs, const Sink& sink, const Layer* adapted);
    void adapt_down(const Layer& layer, const Rows& next, const Sink& bent, const Sink& sink);
    void read_normed(const Norm& norm, float scale, int token, float* to) const;
    void product(const char* name, const Matrix& w, const Rows& x, const Sink& sink);
    void run_products(const char* name);
    Rows shape_rows(Buffer& buffer, const InputForm& form, int num_rows, int length);
    void reserve_scratch(size_t size);
    uint8_t* scratch(int thread) const;

    const Kernels& kernels_;
    std::shared_ptr<Pool> pool_;
    int vocab_size_, hidden_size_;
    float norm_eps_;
    size_t stride_;  // of the residual stream: whole panels

    Buffer residual_, normed_, inputs_, next_inputs_, qkv_, queries_, mixed_, wide_, partial_, logits_, masked_, peaks_;
    Buffer branch_, parallel_, beside_, exact_, other_inputs_, scores_, routes_, gathered_, expert_outputs_;
    Buffer latent_, adapter_normed_, stored_, guesses_, drafts_;
    Buffer streams_, layer_inputs_, laurel_, low_, joined_, merged_;
    std::vector<DraftHeads> draft_heads_;
    std::vector<std::unique_ptr<Adapter>> adapters_;  // by slot
    std::vector<AdapterTask> adapter_tasks_;
    std::vector<int> adapter_tokens_;  // tokens that have one, adapter after adapter
    std::vector<Product> products_;  // of a mixture's experts, with their inputs
    std::vector<int> cuts_;          // [products]: tasks before and in each
    std::vector<Rows> nexts_;        // [num_experts]: inputs of their second products; or [num_heads], of latent attention
    std::vector<Buffer> scratch_;
    std::vector<uint8_t> finite_;  // [num_rows][pieces of a row]
    int pieces_ = 0, kept_rows_ = 0, num_step_tokens_ = 0;
    std::vector<int> head_rows_;  // tokens of the last step whose logits were asked for
    std::vector<Sequence> sequences_;
    std::vector<std::pair<int, int>> completed_;  // (sequence, entry of its table): all keys of these are there after a step has put its own
    std::vector<int> sequence_of_;           // [num_tokens]
    std::vector<int> slot_of_;               // [num_tokens]
    std::vector<int> given_;                 // [num_tokens] rows of `Batch::embeddings`, or -1; empty where there are none
    std::vector<int> before_, state_of_, draft_of_;  // [num_tokens]: token before it; block before its sequence; number of a draft, or -1
    std::vector<int> span_starts_;  // the first state span of each sequence with tokens, and their number
    int num_drafts_ = 0, most_draft_states_ = 0;
    std::vector<Node> nodes_;     // [num_tokens], where there are trees
    std::vector<int32_t> paths_;  // of all nodes
    std::vector<DocumentWeights> document_weights_;  // [num_sequences], or none
    std::vector<AttentionTask> tasks_, shared_tasks_, dealt_;
    // A split of keys that several sequences share: members and rows [first, first + num) of the two lists below.
    struct SharedUnit { int split, first_member, num_members, first_row, num_rows; size_t first_float; };
    std::vector<SharedUnit> shared_units_;
    std::vector<int> shared_members_;
    std::vector<int32_t> shared_rows_;
    std::vector<SharedSplit> shared_splits_;
    struct Join { AttentionTask task; const float* partial; int num_splits; };
    std::vector<Join> joins_;

    bool recording_ = false;
    std::vector<Span> spans_;
    uint64_t num_phases_ = 0;
};

inline double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

template <class Work> void Program::phase(const char* name, int num_tasks, Work&& work, int grain) {
    num_phases_++;
    if (!recording_) return pool_->run(num_tasks, work, grain);
    std::vector<std::pair<double, double>> times(size_t(pool_->num_threads()), {0, 0});
    pool_->run(num_tasks, [&](int task, int thread) {
        auto& [start, end] = times[size_t(thread)];
        if (start == 0) start = now_s();
        work(task, thread);
        end = now_s();
    }, grain);
    for (size_t thread = 0; thread < times.size(); thread++)
        if (times[thread].first != 0) spans_.push_back({name, int(thread), times[thread].first, times[thread].second - times[thread].first});
}

template <class Work> void Program::each_row(const char* name, int num_rows, Work&& work) {
    phase(name, num_rows, work, std::max(1, num_rows / (4 * pool_->num_threads())));
}

}  // namespace cloister
